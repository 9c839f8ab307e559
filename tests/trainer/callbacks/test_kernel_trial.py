"""The first steps decide on all ranks alike whether compiled functions are used."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontier_llm.launch.world import World
from frontier_llm.model import layer, rotary
from frontier_llm.trainer.callbacks.measurements import TRIAL_STEPS, KernelTrial
from tests.forked_train import TINY, train
from tests.ranks import run_ranks

ROTARY = ("model.positions=rotary",)
COMPILED, UNCOMPILED = "compiled", "uncompiled"


@torch.compile(backend="eager")
def kind_of_code(x: torch.Tensor) -> torch.Tensor:
    """Return 1 if this function runs compiled, else 0."""
    return x + (1 if torch.compiler.is_compiling() else 0)


def kinds_by_step(world: World, seconds: list[tuple[list[float], list[float]]]) -> list[str]:
    """Return which code ran in each of eight steps that took the given seconds on each rank."""
    hardware = SimpleNamespace(
        kernels=SimpleNamespace(on_trial=True),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    context: Any = SimpleNamespace(world=world, hardware=hardware)
    trial, kinds = KernelTrial(context), []
    compiled, uncompiled = seconds[world.rank]
    for step, duration in enumerate([*compiled, *uncompiled, 1.0, 1.0], start=1):
        trial.on_step_begin(step)
        kinds.append(COMPILED if kind_of_code(torch.zeros(())).item() else UNCOMPILED)
        end: Any = SimpleNamespace(metrics=SimpleNamespace(step_seconds=duration))
        trial.on_step_end(end)
    trial.close()
    kinds.append(COMPILED if kind_of_code(torch.zeros(())).item() else UNCOMPILED)
    return kinds


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "winner"),
    [
        (([9.0, 1.0, 5.0], [9.0, 2.0, 3.0]), ([9.0, 3.0, 3.0], [1.0, 1.0, 1.0]), COMPILED),
        (([9.0, 3.0, 3.0], [0.1, 2.0, 9.0]), ([1.0, 1.0, 1.0], [9.0, 3.0, 3.0]), UNCOMPILED),
        (([0.1, 3.0, 3.0], [9.0, 2.0, 2.0]), ([1.0, 1.0, 1.0], [9.0, 3.0, 3.0]), UNCOMPILED),
    ],
)
def test_the_times_of_rank_0_decide_on_all_ranks(
    of_rank_0: Any, of_rank_1: Any, winner: str
) -> None:
    """The first step of both kinds does not count, and the fastest of the others does."""
    expected = [COMPILED] * TRIAL_STEPS + [UNCOMPILED] * TRIAL_STEPS + [winner] * 2 + [COMPILED]
    assert run_ranks(kinds_by_step, 2, [of_rank_0, of_rank_1]) == [expected] * 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    lines = (f"In year {year} the ship sailed {year % 7} miles." for year in range(20_000))
    (folder / "text.txt").write_text("\n".join(lines))
    return (f"data.path={folder}/text.txt", f"data.directory={folder}/prepared")


@pytest.mark.exhaustive
def test_a_run_says_what_it_has_decided(corpus: tuple[str, ...], tmp_path: Path) -> None:
    run = (f"run.dir={tmp_path}/run", "trainer.steps=7", "kernels=fastest", *ROTARY)
    ended = train(*TINY, *corpus, *run)
    assert ended.code == 0, ended.text
    ((ratio, outcome),) = re.findall(
        r"functions takes (\S+) of the time, so they are (\w+)", ended.text
    )
    assert outcome == ("used" if float(ratio) < 1 else "not")


@pytest.mark.slow
def test_functions_that_cannot_be_compiled_run_uncompiled(
    corpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        (tmp_path / "called").touch()
        raise RuntimeError("no compiler here")

    compiled = torch.compile(rotary.rotate, backend=broken)
    monkeypatch.setattr(layer, "compiled_rotate", lambda: compiled)
    run = (f"run.dir={tmp_path}/run", "trainer.steps=2", "kernels=fastest", *ROTARY)
    ended = train(*TINY, *corpus, *run)
    assert ended.code == 0, ended.text
    assert (tmp_path / "called").exists()
