"""What a step refuses."""

from typing import Any

import pytest

from frontier_llm.parallel.world import World
from frontier_llm.trainer.step import Notes
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
    return rig.step.run(1, rig.batches(0), 1e-3, Notes(stop=world.rank == 3)).stop


def test_one_rank_that_was_asked_to_stop_stops_all() -> None:
    values = tiny_values("parallel.tensor=2")
    assert run_ranks(stop_one, 4, values) == [True] * 4
