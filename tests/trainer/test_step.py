"""What ends a step, and what its flags tell all ranks."""

from typing import Any

import pytest

from frontier_llm.launch.world import World
from frontier_llm.saving.checkpoints import SavingState
from frontier_llm.trainer.step_result import StepFlags
from tests.ranks import RanksFailedError, run_ranks
from tests.trainer.rig import make_rig
from tests.values import tiny_values


def lose_a_batch(world: World, values: dict[str, Any]) -> None:
    rig = make_rig(world, values)
    rig.step.run(1, rig.batches(0)[:-1], 1e-3)


def test_samples_that_are_lost_end_the_run() -> None:
    with pytest.raises(RanksFailedError, match=r"6 samples .* data\.global_batch=8"):
        run_ranks(lose_a_batch, 2, tiny_values())


def stop_one(world: World, values: dict[str, Any]) -> bool:
    rig = make_rig(world, values)
    return rig.step.run(1, rig.batches(0), 1e-3, lambda: StepFlags(stop=world.rank == 3)).stop


def test_one_rank_that_was_asked_to_stop_stops_all() -> None:
    values = tiny_values("parallel.tensor=2")
    assert run_ranks(stop_one, 4, values) == [True] * 4


def flag_checkpoints(world: World, values: dict[str, Any]) -> list[tuple[bool, bool]]:
    rig = make_rig(world, values)
    states = (
        SavingState(committed=world.rank != 1),
        SavingState(committed=True),
        SavingState(failed=world.rank == 1, committed=world.rank != 1),
    )
    results = [
        rig.step.run(n + 1, rig.batches(n), 1e-3, lambda state=state: StepFlags(saving=state))
        for n, state in enumerate(states)
    ]
    return [(result.saving.committed, result.saving.failed) for result in results]


def test_commits_need_all_ranks_and_failures_need_one() -> None:
    news = [(False, False), (True, False), (False, True)]
    assert run_ranks(flag_checkpoints, 2, tiny_values()) == [news] * 2
