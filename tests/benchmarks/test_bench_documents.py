"""Documents fill a sample, and all contenders of the benchmark run."""

import json

import pytest

from benchmarks.bench_documents import document_lengths, main


@pytest.mark.parametrize("tokens", [1, 100, 8192])
def test_documents_fill_a_sample(tokens):
    lengths = document_lengths(tokens, 50)
    assert lengths.sum() == tokens
    assert lengths.min() >= 1
    assert list(lengths) == list(document_lengths(tokens, 50))


@pytest.mark.exhaustive
def test_all_contenders_run(tmp_path, capfd):
    file = tmp_path / "figures.json"
    assert main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in rows][:2] == ["joined", "separate"]
    assert rows[0]["seconds_over_joined"] == rows[0]["peak_over_joined"] == 1
    assert min(row["seconds"] for row in rows) > 0
    assert "7 documents" in capfd.readouterr().out
