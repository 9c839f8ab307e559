"""A sharded module after a step whose gradient is not finite; and what a pass gathers and frees."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from frontier_llm.engine import hooks
from frontier_llm.engine.sharded import Sharded
from frontier_llm.engine.update import Update
from frontier_llm.launch.world import World
from frontier_llm.library import Formats, shard
from tests.engine.test_shard import RATE, Model, tokens_of, train
from tests.ranks import run_ranks
from tests.streams.mutations import Mutation, mutated

pytestmark = pytest.mark.slow


def skip(sharded: Sharded, step: int, *, saved: bool = False) -> float:
    """Run a step in which the loss of one rank is not a number."""
    own = tokens_of(step).chunk(dist.get_world_size())[dist.get_rank()]
    sharded.backward(sharded.module(own) * (math.nan if dist.get_rank() == 1 else 1.0))
    return sharded.step(RATE, saved=saved)


def go_on(world: World, skips: bool) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """Train steps 1, 2, 4, 5, and between them step 3, which is skipped, or not at all."""
    sharded = shard(Model().train(), params=2, grads=2, optimizer=4)
    train(sharded, 1, 2)
    if skips:
        assert not math.isfinite(skip(sharded, 3))
    norms = train(sharded, 4, 5)
    return norms, sharded.updates, {n: t.clone() for n, t in sharded.named_parameters()}


def differ(mine: list[Any], theirs: list[Any]) -> bool:
    return any(
        norms != others or updates != count or not all(map(torch.equal, w.values(), v.values()))
        for (norms, updates, w), (others, count, v) in zip(mine, theirs, strict=True)
    )


def test_a_skipped_step_leaves_nothing_behind() -> None:
    assert not differ(run_ranks(go_on, 4, True), run_ranks(go_on, 4, False))


def test_a_skipped_step_that_counts_is_noticed() -> None:
    counting = (Sharded.step, "self._updates += not skipped", "self._updates += 1")
    assert differ(run_ranks(mutated, 4, counting, go_on, True), run_ranks(go_on, 4, False))


def from_saved(world: World) -> tuple[list[float], list[float]]:
    """Skip the first step, which is saved; go on, and go on again from its states."""
    formats = Formats(params="int8", refresh="int8", grads="int8", keep_errors=True)
    sharded = shard(Model().train(), optimizer=2, formats=formats)
    skip(sharded, 1, saved=True)
    sharded.settle()
    shards: list[Any] = list(sharded.states.shards())
    kept = [[state.clone() for state in s.states.values()] for s in shards]
    straight = train(sharded, 2, 3)
    sharded.settle()
    for s, states in zip(shards, kept, strict=True):
        for mine, saved in zip(s.states.values(), states, strict=True):
            mine.copy_(saved)
    sharded.continue_from(step=1, updates=0)
    return straight, train(sharded, 2, 3)


def test_a_skipped_step_that_is_saved_is_one_to_go_on_from() -> None:
    for straight, again in run_ranks(from_saved, 2, ranks_per_node=1):
        assert straight == again


def test_a_saved_step_without_a_refresh_is_noticed() -> None:
    mutation: Mutation = (Update.end, "saved or not skipped", "not skipped")
    for straight, again in run_ranks(mutated, 2, mutation, from_saved, ranks_per_node=1):
        assert straight != again


def gathered(world: World) -> list[list[str]]:
    """Return the units in memory after a forward pass of training, and after one of evaluation."""
    sharded = shard(Model().train(), params=2, grads=2, optimizer=2)
    train(sharded, 1, 2)

    def names() -> list[str]:
        units = sharded.states.all_units
        return [unit.name for unit in units if unit.buffer.untyped_storage().nbytes()]

    loss = sharded.module(tokens_of(3)[:4])
    found = [names()]
    sharded.backward(loss)
    sharded.step(RATE)
    with torch.no_grad():
        sharded.module(tokens_of(3)[:4])
    return [*found, names()]


def test_an_evaluation_frees_all_parameters() -> None:
    """After a forward pass of training, the backward pass reads the last layer next."""
    assert run_ranks(gathered, 2) == [[["rest", "layers.2"], []]] * 2


def test_parameters_that_stay_after_an_evaluation_are_noticed() -> None:
    negated = (hooks._attach, "and torch.is_grad_enabled()", "and not torch.is_grad_enabled()")
    assert run_ranks(mutated, 2, negated, gathered)[0][1] == ["rest"]
