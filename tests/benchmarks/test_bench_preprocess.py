"""The comparison of preprocessing reports contenders that fail."""

import pytest

from benchmarks import bench_preprocess
from benchmarks.bench_preprocess import Figures, cells_of, main, turn
from benchmarks.harness import Contender
from frontier_llm.errors import TrainingError


def test_the_table_names_a_failed_contender():
    ours = Contender("ours", lambda: None, error="no memory")
    other = Contender("megatron", lambda: None, [Figures(2.0, 3.0, 8, 0)])
    assert cells_of(ours, ours, 1000) == ["ours", "failed: no memory"]
    assert cells_of(other, ours, 1000)[:2] == ["megatron", "2.0"]


def test_a_contender_that_dies_without_output_has_failed(tmp_path):
    with pytest.raises(TrainingError, match="ended with exit code 1"):
        turn("megatron", "false", tmp_path, workers=1)


@pytest.mark.parametrize("fails", [True, False])
def test_the_exit_code_is_1_if_a_contender_failed(fails, monkeypatch):
    def make_models(folder, _):
        (folder / "tokenizer.model").touch()
        return {"ours": "python", "megatron": "python"}

    def take(name, *_):
        if fails and name == "megatron":
            raise TrainingError("killed")
        return Figures(1.0, 1.0, 1, 1)

    monkeypatch.setattr(bench_preprocess, "make_input", lambda *_: 1)
    monkeypatch.setattr(bench_preprocess, "make_models", make_models)
    monkeypatch.setattr(bench_preprocess, "turn", take)
    assert main(["--rounds", "1"]) == int(fails)
