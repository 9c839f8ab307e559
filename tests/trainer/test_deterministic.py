"""`trainer.deterministic` is in force on every rank and changes no digit on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.device.kernels import use_deterministic_operations
from frontier_llm.launch.world import World
from tests.forked_train import TINY, train
from tests.ranks import in_turn, run_ranks
from tests.texts import prose
from tests.trainer.callbacks import my_callbacks
from tests.trainer.rig import make_rig
from tests.values import TINY_T5, tiny_values

IN_FORCE = {"enabled": True, "warns only": False, "fills memory": False, "products": ":4096:8"}
SMALL = ("model.layers=2", "data.global_batch=4")
DROPOUT = ("model.dropout=0.1", "model.attention_dropout=0.1")


@pytest.mark.slow
def test_a_run_has_the_settings_on_every_rank_and_the_same_losses(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(prose(40))
    figures = {}
    for deterministic in ("false", "true"):
        run_dir = tmp_path / deterministic
        ended = train(
            *TINY, f"data.path={text}", f"data.directory={tmp_path}/prepared",
            f"run.dir={run_dir}", "trainer.steps=4", f"trainer.deterministic={deterministic}",
            f"callbacks=[{my_callbacks.MODULE}:NotesSettings]",
        )  # fmt: skip
        assert ended.code == 0, ended.text
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        figures[deterministic] = [(line["loss"], line["grad_norm"]) for line in lines]
        found = [json.loads((run_dir / f"settings_{rank}").read_text()) for rank in (0, 1)]
        assert [one == IN_FORCE for one in found] == [deterministic == "true"] * 2, found
    assert len(figures["true"]) == 4
    assert figures["true"] == figures["false"]


def digits(world: World, values: dict[str, Any], deterministic: bool) -> list[tuple[float, float]]:
    if deterministic:
        use_deterministic_operations()  # in this case and those after it
    return [(step.loss, step.grad_norm) for step in make_rig(world, values).train(2)]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((*TINY_T5, "sharding=zero3"), marks=pytest.mark.exhaustive),
        (*DROPOUT, *SMALL, "parallel.tensor=2", "parallel.sequence=true", "recompute=full"),
        ("collectives=zeropp", "sharding=zero3", "parallel.pipeline=2"),
    ],
    ids=["t5", "tensor", "quantised"],
)
def test_no_digit_changes_on_a_cpu(overrides: tuple[str, ...]) -> None:
    values = tiny_values(*overrides)
    for plain, deterministic in run_ranks(in_turn, 4, digits, [(values, False), (values, True)]):
        assert plain == deterministic
