"""The overlapped share is computed correctly, and the measurement runs."""

import json

import pytest

from benchmarks.bench_overlap import Figures, main


@pytest.mark.parametrize(("together", "hidden"), [(3.0, 0.0), (2.0, 1.0), (2.5, 0.5), (3.5, -0.5)])
def test_hidden_is_a_share_of_the_shorter_time(together, hidden):
    assert Figures("1gbit", 8.0, 1.0, 2.0, together).hidden == hidden


def test_two_ranks_send_and_compute(tmp_path, capfd):
    file = tmp_path / "figures.json"
    small = ["--megabytes", "0.5", "--messages", "2", "--rounds", "1", "--json", str(file)]
    assert main(small) == 0
    (link,) = json.loads(file.read_text())["links"]
    assert link["megabytes"] == 1.0
    assert min(link[what] for what in ("transfer", "compute", "together")) > 0
    assert "loopback" in capfd.readouterr().out
