"""Training steps give the same numbers in every order that the waits between streams allow.

Each step runs on a virtual device (virtual_device.py), whose operations run in an adversarial
order, and is compared to the last bit with the same step run in the order of the program. Then each
wait is removed in turn: without it, some order gives other numbers.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from frontier_llm.collectives.handles import Chain
from frontier_llm.collectives.primitives import ReduceScatter, sum_together
from frontier_llm.collectives.transport import Transport
from frontier_llm.launch.world import World
from frontier_llm.model.linear import _Linear
from frontier_llm.parallel.stage_exchange import StageExchange
from frontier_llm.sharding.gradients import Gradients
from frontier_llm.sharding.parameters import Parameters
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.step_result import reduce_totals
from tests.covering import covering
from tests.ranks import RanksFailedError, in_turn, run_ranks
from tests.streams.mutations import mutate
from tests.streams.virtual_device import Order, virtual_device
from tests.trainer.rig import make_rig
from tests.trainer.test_sharding_parity import factors
from tests.values import tiny_values

pytestmark = pytest.mark.slow

STEPS = 2
"""The first step records the order in which units are gathered, the second prefetches by it."""
SMALL = ("model.layers=2", "collectives.pairwise=false", "kernels=torch")
QUANTISED = ("collectives=zeropp", "collectives.block_elements=64")
IN_3D = (
    "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "data.global_batch=4",
)  # fmt: skip
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    **{
        str(chain): (4, "fp32", tuple(factors(chain)))
        for chain in [(1, 1, 1), (1, 1, 4), (1, 2, 2), (2, 2, 2), (2, 2, 4), (4, 4, 4)]
    },
    "(2, 2, 4) quantised": (4, "bf16", (*factors((2, 2, 4)), *QUANTISED)),
    "one unit in flight": (4, "fp32", (*factors((2, 4, 4)), "sharding.units_in_flight=1")),
    "recomputed": (2, "bf16", (*factors((2, 2, 2)), "recompute=full")),
    "three dimensions": (8, "fp32", (*IN_3D, *factors((2, 2, 2)))),
}
"""By name: number of ranks, two of which form a node; precision; settings."""
Mutation = tuple[Callable[..., Any], str, str]
Numbers = list[tuple[float, float]]
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "a chain waits for each step": (
        "(4, 4, 4)",
        (
            Chain.advance,
            "self._resume(self._handle.wait())",
            "self._resume(hasattr(self._handle, 'event') or self._handle.wait())",
        ),
    ),
    "a chain waits for all its steps": (
        "one unit in flight",
        (Chain.wait, "while not self.is_done", "if not self.is_done"),
    ),
    "a gather is over before modules read": (
        "three dimensions",
        (Parameters.acquire, "self._gathers.pop(unit).wait()", "self._gathers.pop(unit)"),
    ),
    "gathers are over before their memory is freed": (
        "(4, 4, 4)",
        (Parameters.end_step, "self._gathers.pop(unit).wait()", "self._gathers.pop(unit)"),
    ),
    "a refresh is over before a gather": (
        "(2, 2, 4)",
        (Parameters._finish_refresh, "pop(earlier).wait()", "pop(earlier)"),
    ),
    "a refresh is over before modules read": (
        "(1, 1, 4)",
        (Parameters._finish_refresh, "pop(earlier).wait()", "pop(earlier)"),
    ),
    "old reductions are over before new ones": (
        "one unit in flight",
        (
            Gradients._start_reduction,
            "self._under_way.popleft().wait()",
            "self._under_way.popleft()",
        ),
    ),
    "reductions are over before the norm": (
        "(1, 1, 4)",
        (Gradients.finish, "self._under_way.popleft().wait()", "self._under_way.popleft()"),
    ),
    "a reduce-scatter is over before its sum": (
        "(2, 2, 2)",
        (ReduceScatter.wait, "self._work.wait()", "pass"),
    ),
    "slots have arrived before they are decoded": (
        "(2, 2, 4) quantised",
        (Transport._scatter, "yield work", "yield type('Done', (), {'wait': lambda self: None})()"),
    ),
    "slots are lent until they have arrived": (
        "(2, 2, 4) quantised",
        (Transport._scatter, "yield work", "self.pool.give_back(received.data); yield work"),
    ),
    "slots are lent until they are sent": (
        "(2, 2, 4) quantised",
        (Transport._scatter, "yield work", "self.pool.give_back(sent.data); yield work"),
    ),
    "gathered slots are lent until they are decoded": (
        "(2, 2, 4) quantised",
        (
            Transport.gather,
            "part_bytes = elements * itemsize",
            "part_bytes = elements * itemsize; self.pool.give_back(sent)",
        ),
    ),
    "sums over tensor ranks are over before they are read": (
        "three dimensions",
        (sum_together, "name).wait()", "name)"),
    ),
    "sums over tied copies are over before they are read": (
        "three dimensions",
        (ShardedStates._add_tied, '"tied_copies").wait()', '"tied_copies")'),
    ),
    "a stage waits for what it reads": (
        "three dimensions",
        (StageExchange.receive, "work.wait()", "pass"),
    ),
    "tokens are gathered before a product reads them": (
        "three dimensions",
        (_Linear.forward, "gather.wait()", "pass"),
    ),
    "tokens are gathered before they are multiplied with a gradient": (
        "three dimensions",
        (_Linear.backward, "gather.wait()", "pass"),
    ),
    "gradients of inputs are summed before they are read": (
        "three dimensions",
        (_Linear.backward, "reduction.wait()", "pass"),
    ),
    "the sums of a step are over before the host reads them": (
        "(1, 1, 4)",
        (reduce_totals, '"totals").wait()', '"totals")'),
    ),
}
"""By the wait that is removed: the case that needs it, and the change of the source."""


def train(
    world: World,
    values: dict[str, Any],
    precision: str,
    order: Order | None,
    mutation: Mutation | None,
) -> tuple[Numbers, list[torch.Tensor]]:
    """Train in an order; None is the order of the program.

    Returns:
        The loss and norm of each step, and this rank's states after the last step.
    """
    if mutation is not None:
        mutate(*mutation)
    rig = make_rig(world, values, precision)
    batches = [rig.batches(step) for step in range(STEPS)]
    with nullcontext() if order is None else virtual_device(order):
        steps = [rig.step.run(step + 1, batch, 0.01) for step, batch in enumerate(batches)]
        rig.states.settle()
    shards = list(rig.states.shards())
    states = [state.clone() for shard in shards for state in shard.states.values()]
    return [(step.loss, step.grad_norm) for step in steps], states


def run(case: str, orders: Sequence[Order | None], mutation: Mutation | None = None) -> Any:
    """Train in each order; return what `train` returns, per rank and order."""
    size, precision, overrides = CASES[case]
    values = tiny_values(*SMALL, *overrides)
    cases = [(values, precision, order, mutation) for order in orders]
    return run_ranks(in_turn, size, train, cases, ranks_per_node=2, timeout=180)


@functools.cache
def unchanged(case: str) -> Any:
    """Train without a mutation: in the order of the program, and in every other order."""
    return run(case, [None, *Order])


def differing(case: str, orders: Sequence[Order], results: Any) -> list[Order]:
    """Return the orders in which a rank's numbers or states differ in any bit."""
    found: list[Order] = []
    for expected, per_order in zip(unchanged(case), results, strict=True):
        expected_numbers, expected_states = expected[0]
        for order, (numbers, states) in zip(orders, per_order, strict=True):
            if numbers != expected_numbers or not all(map(torch.equal, states, expected_states)):
                found.append(order)
    return found


COVERED = (
    "(1, 1, 1)", "(1, 1, 4)", "(1, 2, 2)", "(2, 2, 2)", "(2, 2, 4)", "(4, 4, 4)", "recomputed",
    "one unit in flight",
)  # fmt: skip
"""Cases whose hops the quantised case and the one in three dimensions have too."""


@pytest.mark.parametrize("case", covering(CASES, COVERED))
def test_every_order_gives_the_same_numbers(case: str) -> None:
    assert differing(case, list(Order), [rank[1:] for rank in unchanged(case)]) == []


ONE_OF_A_KIND = ("slots have arrived before they are decoded", "a stage waits for what it reads")
"""Waits that are always removed, in cases that always run: the test above notices."""


@pytest.mark.parametrize(
    "wait", covering(MUTATIONS, [name for name in MUTATIONS if name not in ONE_OF_A_KIND])
)
def test_no_wait_can_be_removed(wait: str) -> None:
    """Some order gives other numbers, or ends the training."""
    case, mutation = MUTATIONS[wait]
    for order in Order:
        try:
            if differing(case, [order], run(case, [order], mutation)):
                return
        except RanksFailedError as error:
            if "Traceback" in str(error):  # and not only a time limit
                return
            raise
    raise AssertionError("no order gives other numbers")
