"""The comparison of preprocessing reports contenders that fail."""

import pytest
from rich.console import Console

from benchmarks import bench_preprocess
from benchmarks.bench_preprocess import Outcome, main, make_table, turn


def test_the_table_names_a_failed_contender(capsys):
    other = Outcome("megatron", seconds=[2.0], cpu_seconds=[3.0], tokens=8)
    Console(width=120).print(make_table([Outcome("ours", error="no memory"), other], 1000))
    output = capsys.readouterr().out
    assert "failed: no memory" in output
    assert "megatron" in output


def test_a_contender_that_dies_without_output_has_failed(tmp_path):
    outcome = Outcome("megatron")
    turn(outcome, "false", tmp_path, workers=1)
    assert outcome.error == "ended with exit code 1"


@pytest.mark.parametrize("fails", [True, False])
def test_the_exit_code_is_1_if_a_contender_failed(fails, monkeypatch):
    def make_models(folder, _):
        (folder / "tokenizer.model").touch()
        return {"ours": "python", "megatron": "python"}

    def take(outcome, *_):
        outcome.error = "killed" if fails and outcome.name == "megatron" else ""

    monkeypatch.setattr(bench_preprocess, "make_input", lambda *_: 1)
    monkeypatch.setattr(bench_preprocess, "make_models", make_models)
    monkeypatch.setattr(bench_preprocess, "turn", take)
    assert main(["--rounds", "1"]) == int(fails)
