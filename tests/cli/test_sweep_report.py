"""The table, the picture and the ranking of a sweep."""

import json
import sys
from dataclasses import asdict, replace

import pytest

from frontier_llm.cli.sweep_report import main
from frontier_llm.cli.sweep_trials import axes, pareto, read, sensitivity
from frontier_llm.cli.trial import Trial
from frontier_llm.errors import DataError
from frontier_llm.units import GIB


def _trial(tensor, micro_batch, speed, memory=1.0, status="done", reason=""):
    overrides = ["experiment=x", f"parallel.tensor={tensor}", f"+data.micro_batch={micro_batch}"]
    peak = int(memory * GIB) if status == "done" else None
    return Trial(overrides, status, reason, 10.0, float(speed), peak, 4.0, None)


TRIALS = [
    _trial(1, 1, 100, 2), _trial(1, 2, 110, 3), _trial(2, 1, 200, 2.5), _trial(2, 2, 210, 4),
    _trial(4, 1, 0, status="refused", reason="configuration error at plan\n  got:    80 GiB\n"),
]  # fmt: skip


def test_axes_are_the_keys_that_vary():
    assert axes(TRIALS) == {
        "data.micro_batch": ["1", "2", "1", "2", "1"],
        "parallel.tensor": ["1", "1", "2", "2", "4"],
    }


def test_the_axis_that_decides_comes_first():
    shares = sensitivity(TRIALS)
    assert list(shares) == ["parallel.tensor", "data.micro_batch"]
    assert shares["parallel.tensor"] > 0.95 > 0.2 > shares["data.micro_batch"]


def test_an_axis_that_changes_nothing_explains_nothing():
    assert sensitivity([_trial(1, 1, 5), _trial(2, 1, 5)]) == {"parallel.tensor": 0.0}


def test_no_best_trial_is_beaten_in_both():
    best = [(p.tokens_per_second, p.peak_bytes / GIB) for p in pareto(TRIALS)]
    assert best == [(210, 4), (200, 2.5), (100, 2)]


@pytest.fixture
def folder(tmp_path):
    for number, trial in enumerate(TRIALS):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "trial.json").write_text(json.dumps(asdict(trial)))
    return tmp_path


def test_the_report_has_every_trial_and_why_it_failed(folder, capsys):
    assert [trial.tokens_per_second for trial in read(folder)] == [210, 200, 110, 100, 0]
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "4 of 5 trials done" in said
    assert "| 210 * | 4.00 | 2 | 2 | 10.0 s | done |" in said
    assert "refused: got: 80 GiB" in said
    assert (folder / "sweep.md").read_text().strip() in said
    assert "| parallel.tensor | " in said.partition("mean absolute contribution, tokens/s")[2]
    assert "| 5 | 210 |" in said
    for picture in ("pareto.svg", "sensitivity.svg", "importance.svg", "convergence.svg"):
        assert "<svg" in (folder / picture).read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"status": "done"}'])
def test_a_damaged_trial_is_named(folder, text):
    (folder / "3" / "trial.json").write_text(text)
    with pytest.raises(DataError, match=r"3/trial\.json is damaged"):
        read(folder)


def test_a_folder_without_trials_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "contains no trial.json" in capsys.readouterr().err


def test_other_searches_stand_beside_the_sweep(folder, tmp_path_factory, capsys):
    others = []
    for speed in (30, 50):
        others.append(tmp_path_factory.mktemp("random"))
        (others[-1] / "0").mkdir()
        _trial(1, 1, speed).write(others[-1] / "0")
    assert main([str(folder), "--beside", *map(str, others)]) == 0
    assert "| trials | this search | others |" in capsys.readouterr().out


def test_a_sweep_over_nodes_is_compared_per_device(folder, capsys):
    for number, (trial, ranks) in enumerate(zip(TRIALS, (1, 1, 8, 8, 8), strict=True)):
        replace(trial, ranks=ranks, goal="speed_per_device").write(folder / str(number))
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.index("| 110.0 * |") < said.index("| 26.2")
    assert "tokens/s per device" in said


def test_without_the_libraries_the_report_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shap", None)
    assert main([str(folder)]) == 0
    assert "pip install 'frontier-llm[sweep]'" in capsys.readouterr().out
    assert not (folder / "importance.svg").exists()
