"""A wrong line in the engine makes the behaviour fail that depends on it."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest

from frontier_llm.engine import module_units
from frontier_llm.engine.hooks import Hook
from frontier_llm.engine.lazy_checkpoints import write_back
from frontier_llm.engine.passes import Passes
from frontier_llm.engine.shard import _check_equal_start, _set_masters
from frontier_llm.engine.sharded import Sharded
from frontier_llm.launch.world import World
from frontier_llm.library import Checkpoints
from frontier_llm.sharding.guarded import Guarded
from frontier_llm.sharding.unit_gradients import UnitGradients
from tests.covering import covering
from tests.engine import test_refusals, test_states
from tests.engine.loops import BEHAVIOURS
from tests.engine.reference import (
    RANKS,
    Behaviour,
    Trained,
    attempt,
    differences,
    in_one_process,
    on_one_start,
    on_ranks,
)
from tests.ranks import run_ranks
from tests.streams.mutations import Mutation, mutate

pytestmark = pytest.mark.slow

MUTANTS: dict[str, tuple[str, int, Mutation]] = {
    "micro-batches do not divide the gradient": (
        "micro-batches", 2, (Sharded.step, " * self._passes.micro_batches", ""),
    ),
    "passes of no_sync do not count": (
        "no_sync", 4, (Passes.expect_more, "self.expected += 1", "self.expected += 0"),
    ),
    "parameters without gradient are updated": (
        "frozen between steps", 1, (Sharded.step, "if not n}", "if False}"),
    ),
    "old gradients stay": (
        "layers dropped by rank", 1, (UnitGradients._zero_untouched, "not in", "in"),
    ),
    "a failed step is not forgotten": (
        "error in the second backward", 2, (Passes.drop_step, "if self.in_step:", "if False:"),
    ),
    "rates of groups are forgotten": (
        "groups of parameters", 4,
        (module_units._records, "1.0 if own is None else own.rate_factor", "1.0"),
    ),
    "decay of groups is forgotten": (
        "groups of parameters", 1,
        (module_units._records, "None if own is None else own.weight_decay", "None"),
    ),
    "masters are rounded": (
        "bf16", 2, (_set_masters, "if not values:", "if True:"),
    ),
    "recomputation begins no pass": (
        "recomputed, reentrant, root is not called", 2,
        (Passes._begin_forward, "self._begin_pass_of_backward()", "pass"),
    ),
}  # fmt: skip
"""By name: the behaviour that fails, its sharding factor, and the change of the source."""

CHECKS: dict[str, tuple[tuple[Any, ...], Mutation]] = {
    "missed updates are not saved": (
        test_states.CHECKS["resumed with frozen parameters"],
        (Sharded.step, "+ 1", "+ 0"),
    ),
    "writes are forgotten": (
        test_states.CHECKS["writes, params=2"],
        (Sharded.gathered, "self._passes.take_written()", "pass"),
    ),
    "copies keep the hooks": (
        test_states.CHECKS["copies, params=1"],
        (Hook.__deepcopy__, "lambda *_: None", "self._call"),
    ),
    "loading keeps the masters": (
        test_states.CHECKS["load_state_dict, bf16"],
        (Sharded.__init__, "passes.take_written()", "None"),
    ),
    "buffers are not read": (
        test_states.CHECKS["buffers"],
        (Checkpoints._load, "if name in stored", "if name not in stored"),
    ),
    "buffers are converted": (
        test_states.CHECKS["buffers"],
        (write_back, "data.view(buffer.dtype)", "data.to(buffer.dtype)[: buffer.numel()]"),
    ),
    "ranks may start apart": (
        test_refusals.CHECKS["modules"],
        (_check_equal_start, "if any(differs)", "if False"),
    ),
    "thawed parameters are not noticed": (
        test_refusals.CHECKS["change: trainable, params=1"],
        (Passes._check_parameters, "not in self._trained", "is None"),
    ),
    "replaced memory is not noticed": (
        test_refusals.CHECKS["change: dtype, params=1"],
        (Passes._check_parameters, "not unit.owns(record.parameter)", "_cdata == 0"),
    ),
    "loading is not refused": (
        test_refusals.CHECKS["load_state_dict"],
        (Sharded._before_load, "params > 1", "params > 9"),
    ),
    "freed parameters are not printed": (
        test_refusals.CHECKS["reads before a step"],
        (Guarded.__format__, "if spec else", "if True else"),
    ),
}


def trains(behaviour: Behaviour, params: int, expected: Trained) -> None:
    assert differences(behaviour, on_ranks(behaviour, params), expected) == {}


def changed(world: World, mutation: Mutation, check: Callable[..., object], *args: Any) -> str:
    """Run a check with a changed function, whose code is restored then."""
    function = mutation[0]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = function.__code__
    mutate(function, *mutation[1:])
    try:
        return attempt(world, check, *args)
    finally:
        function.__code__ = code


USUAL = (
    "micro-batches do not divide the gradient", "old gradients stay", "masters are rounded",
    "recomputation begins no pass", "missed updates are not saved", "writes are forgotten",
    "buffers are not read", "thawed parameters are not noticed", "ranks may start apart",
)  # fmt: skip
"""Mutants that always run: some of training, of states and of refusals."""


@functools.cache
def results(are_usual: bool) -> dict[str, tuple[str, ...]]:
    """Return what each rank found with the mutants that always run, or with the others."""
    cases: dict[str, tuple[Any, ...]] = {
        mutant: (mutation, trains, BEHAVIOURS[name], params, in_one_process(BEHAVIOURS[name]))
        for mutant, (name, params, mutation) in MUTANTS.items()
        if (mutant in USUAL) == are_usual
    }
    cases |= {
        mutant: (mutation, *check)
        for mutant, (check, mutation) in CHECKS.items()
        if (mutant in USUAL) == are_usual
    }
    return on_one_start(changed, cases)


@pytest.mark.parametrize(
    "mutant",
    covering([*MUTANTS, *CHECKS], [name for name in [*MUTANTS, *CHECKS] if name not in USUAL]),
)
def test_mutants_fail(mutant: str) -> None:
    errors = results(mutant in USUAL)[mutant]
    assert len(errors) == RANKS, errors  # no rank has died
    assert any(errors)


@pytest.mark.parametrize(
    "mutation",
    [
        (Guarded.__torch_function__, "func not in _METADATA", "func is None"),
        (Guarded.__torch_function__, "tree_leaves((args, kwargs))", "args"),
    ],
    ids=["nothing is guarded", "lists are not guarded"],
)
def test_reads_of_freed_memory_are_noticed(mutation: Mutation) -> None:
    method: MethodType = mutation[0]
    check = test_refusals.CHECKS["reads before a step"]
    assert all(run_ranks(changed, RANKS, (method.__func__, *mutation[1:]), *check))
