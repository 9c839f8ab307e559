"""Backward passes that compute the gradients of weights later, against whole backward passes."""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from frontier_llm.geometry.wire import Sent
from frontier_llm.launch.world import World
from frontier_llm.sharding.deferred_gradients import Contribution, DeferredGradients
from frontier_llm.sharding.gradients import Gradients
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit_gradients import UnitGradients
from tests.covering import covering, exhaustive
from tests.ranks import RanksFailedError, run_ranks
from tests.streams.mutations import mutate
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_sharding_parity import factors
from tests.values import TINY_T5, tiny_values

pytestmark = pytest.mark.slow

STEPS = 2
"""The second step has a recorded order of gathers, and rounding errors of the first."""
MICRO_BATCHES = 4
ORDERS = {
    "whole": "F0 F1 D0 F2 D1 F3 D2 D3",
    "at once": "F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3",
    "two wait": "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
    "all wait": "F0 F1 B0 F2 B1 F3 B2 B3 W0 W1 W2 W3",
    "some whole": "F0 F1 D0 F2 B1 F3 B2 W1 W2 D3",
    "last first": "F0 F1 B0 F2 B1 F3 B2 W2 B3 W1 W3 W0",
}
"""Forward passes (F), whole backward passes (D), and their parts: gradients of the inputs (B) and
of the weights (W), of four micro-batches."""
UNTIED = ("model.tied=false", "model.activation=swiglu", "model.bias=false", "model.kv_heads=2")
SEQUENCE = ("parallel.tensor=2", "parallel.sequence=true")
BETWEEN_NODES = ("collectives=zeropp_feedback", "collectives.block_elements=64")
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "tied": (1, "fp32", ()),
    "untied": (1, "bf16", UNTIED),
    "selective": (1, "fp32", ("recompute=selective",)),
    "full": (1, "fp32", (*UNTIED, "recompute=full")),
    "tensor": (2, "fp32", ("parallel.tensor=2",)),
    "sequence": (2, "fp32", (*SEQUENCE, *UNTIED)),
    "sequence, sharded, full": (
        4, "bf16", (*SEQUENCE, "recompute=full", *factors((2, 2, 2))),
    ),
    "(1, 1, 2)": (2, "fp32", tuple(factors((1, 1, 2)))),
    "(1, 2, 2)": (2, "fp32", tuple(factors((1, 2, 2)))),
    "(2, 2, 4)": (4, "fp32", (*UNTIED, *factors((2, 2, 4)))),
    "one unit in flight": (2, "fp32", ("sharding.units_in_flight=1", *factors((2, 2, 2)))),
    "bf16 messages": (2, "bf16", (*factors((1, 2, 2)), "collectives.grads_format=bf16")),
    "quantised": (2, "bf16", (*factors((2, 2, 2)), *BETWEEN_NODES)),
    "apart": (2, "fp32", (*factors((1, 2, 2)), "sharding.fused_gradients=false")),
    "t5": (1, "fp32", TINY_T5),
    "t5, full": (2, "fp32", (*TINY_T5, "recompute=full", *factors((1, 2, 2)))),
    "t5, sequence": (2, "fp32", (*TINY_T5, *SEQUENCE)),
}  # fmt: skip
"""By name: number of ranks, each on a node of its own; precision; settings."""

COVERED = (
    "selective", "full", "tensor", "(1, 1, 2)", "bf16 messages", "t5", "t5, sequence",
    "sequence, sharded, full", "one unit in flight", "(2, 2, 4)", "(1, 2, 2)",
)  # fmt: skip
"""Cases whose settings other cases have too, and which run only in exhaustive tests."""


def values_of(case: str) -> tuple[int, dict[str, Any], str]:
    ranks, precision, overrides = CASES[case]
    chosen = dict(o.split("=", 1) for o in overrides)
    replicas = ranks // int(chosen.get("parallel.tensor", 1))
    batch = f"data.global_batch={MICRO_BATCHES * replicas}"
    return ranks, tiny_values("model.layers=2", batch, *overrides), precision


def run_step(
    rig: Rig, step: int, order: str, after: Callable[[str], None] = lambda _: None
) -> torch.Tensor:
    """Run one step with the passes in this order; return the gradient's squared norm.

    Args:
        rig: a rank with a single pipeline stage.
        step: counted from 1.
        order: a string as in ORDERS.
        after: called after each pass.
    """
    (chunk,), states, batches = rig.model.chunks, rig.states, rig.batches(step)
    losses: dict[int, torch.Tensor] = {}
    states.begin_step(step, len(batches))
    for action in order.split():
        kind, number = action[0], int(action[1:])
        batch = batches[number]
        if kind == "F":
            of_tokens = chunk(**batch.inputs(), labels=batch.labels)
            loss = batch.mean_loss(of_tokens.cross_entropy)
            losses[number] = loss / (len(batches) * rig.groups.grid.data)
        elif kind == "W":
            states.passes.run_deferred((0, number))
        else:
            context: AbstractContextManager[None] = nullcontext()
            if kind == "B":
                context = states.passes.deferred.collecting((0, number))
            with context:
                losses.pop(number).backward()
        after(action)
    states.finish_backward()
    return states.squared_norm()


Result = tuple[list[float], list[torch.Tensor], list[torch.Tensor], list[dict[str, Sent]]]
"""Norms, the last gradients and this rank's states; the bytes sent in each step."""


def train(
    world: World, values: dict[str, Any], precision: str, orders: Sequence[str], mutation: Any
) -> list[Result]:
    """Train once in each order."""
    if mutation is not None:
        mutate(*mutation)
    results = []
    rig: Rig | None = None
    for order in orders:
        rig = make_rig(world, values, precision, groups_of=rig)
        results.append(train_in_order(rig, ORDERS[order]))
    return results


def train_in_order(
    rig: Rig, order: str, rate: float = 1e-3, after: Callable[[str], None] = lambda _: None
) -> Result:
    norms, sent = [], []
    for step in range(1, STEPS + 1):
        norms.append(run_step(rig, step, order, after).item())
        gradients = [gradient.clone() for _, _, gradient in rig.states.gradients()]
        rig.states.update(rate, torch.ones(()))
        rig.states.refresh()
        rig.states.settle()
        sent.append(rig.traffic.take())
    shards = [state for s in rig.states.shards() for state in s.states.values()]
    return norms, gradients, [state.clone() for state in shards], sent


def run(case: str, orders: Sequence[str], mutation: Any = None) -> list[list[Result]]:
    """Return, per rank, the results in each order."""
    ranks, values, precision = values_of(case)
    return run_ranks(
        train, ranks, values, precision, orders, mutation, ranks_per_node=1, timeout=180
    )


EQUAL = ("at once", "two wait", "all wait", "some whole")
"""Orders that add up the micro-batches as whole passes do."""


TELLING, REST = ("two wait", "some whole"), ("at once", "all wait")
"""Equal orders in which factors wait, or passes of both kinds alternate; and the others."""
CASES_AND_ORDERS = [
    ("tied", EQUAL),
    *((case, TELLING) for case in CASES if case != "tied" and case not in COVERED),
]
"""The cases that always run; one has all orders."""


@functools.cache
def unchanged(case: str, orders: tuple[str, ...]) -> list[list[Result]]:
    """Return, per rank, the results of whole passes, and of each of some equal orders."""
    return run(case, ["whole", *orders])


@functools.cache
def whole(case: str) -> list[list[Result]]:
    return [results[:1] for results in unchanged(case, dict(CASES_AND_ORDERS).get(case, ()))]


def differing(case: str, orders: Sequence[str], found_in: list[list[Result]]) -> set[str]:
    """Return the orders in which a rank's numbers, states or bytes differ from whole passes."""
    found = set()
    for results, (expected,) in zip(found_in, whole(case), strict=True):
        for order, result in zip(orders, results, strict=True):
            tensors = zip((*result[1], *result[2]), (*expected[1], *expected[2]), strict=True)
            same = all(torch.equal(mine, theirs) for mine, theirs in tensors)
            if not same or (result[0], result[3]) != (expected[0], expected[3]):
                found.add(order)
    return found


@pytest.mark.parametrize(
    ("case", "orders"),
    [
        *CASES_AND_ORDERS,
        *exhaustive(*((case, REST) for case, orders in CASES_AND_ORDERS if orders != EQUAL)),
        *exhaustive(*((case, EQUAL) for case in COVERED)),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_deferred_gradients_equal_those_of_whole_passes_in_every_bit(
    case: str, orders: tuple[str, ...]
) -> None:
    found = [results[1:] for results in unchanged(case, orders)]
    assert differing(case, orders, found) == set()


@pytest.mark.parametrize(
    "case", covering(["tied", "(1, 2, 2)", "sequence", "t5, full"], ["(1, 2, 2)", "t5, full"])
)
def test_another_order_of_micro_batches_differs_by_rounding_only(case: str) -> None:
    for (mine,), (theirs,) in zip(run(case, ["last first"]), whole(case), strict=True):
        assert mine[3] == theirs[3]
        assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
        for gradient, expected in zip(mine[1], theirs[1], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "a product is left out": (
        "tied",
        (
            DeferredGradients.run,
            "contribution = queue.popleft()",
            "contribution = (queue.pop(), queue and queue.popleft())[1] or queue.popleft()",
        ),
        "",
    ),
    "products of another micro-batch": (
        "tied",
        (
            DeferredGradients.run,
            "queue = self._queues[key]",
            "queue = max(self._queues.items())[1]",
        ),
        "",
    ),
    "parts of the tokens": (
        "sequence",
        (Contribution.start_gather, "self.gather is not None", "False"),
        "RuntimeError",
    ),
    "one gradient of the unit is enough to release it": (
        "one unit in flight",
        (Gradients.take, "== len(unit.records)", "== 1"),
        "is read outside",
    ),
    "one gradient of the unit is enough for its reduction": (
        "(1, 2, 2)",
        (UnitGradients.note_added, "min(counts)", "max(counts)"),
        "after its reduction",
    ),
    "the gradients of one micro-batch are all": (
        "(1, 1, 2)",
        (UnitGradients.note_added, "> self._micro_batches - self.reductions_left", "> 0"),
        "after its reduction",
    ),
    "factors count as gradients": (
        "(1, 2, 2)",
        (Gradients.take, "if not defer:", "if True:"),
        "after its reduction",
    ),
    "a micro-batch is not expected": (
        "(1, 2, 2)",
        (ShardedStates.begin_step, "begin_step(micro_batches)", "begin_step(micro_batches - 1)"),
        "after its reduction",
    ),
    "norms do not wait": (
        "(1, 2, 2)",
        (UnitGradients.is_small_part, "<= _SMALL_PART", "< 0"),
        "",
    ),
}
"""By name: the case that notices, the change of the source, and the error; without an error the
numbers differ."""


ONE_OF_A_KIND = (
    "a product is left out", "parts of the tokens", "factors count as gradients",
)  # fmt: skip
"""Mistakes that always run: those of the most common errors, and one that changes the numbers."""


@pytest.mark.parametrize(
    "mistake", covering(MISTAKES, [name for name in MISTAKES if name not in ONE_OF_A_KIND])
)
def test_mistakes_are_noticed(mistake: str) -> None:
    case, mutation, error = MISTAKES[mistake]
    whole(case)
    if error:
        with pytest.raises(RanksFailedError, match=error):
            run(case, ["two wait"], mutation)
    else:
        assert differing(case, ["two wait"], run(case, ["two wait"], mutation))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0 B0", "were not computed"),
        ("F0 B0 W0 W0", "KeyError"),
        ("F0 D0 F0 B0 W0", "after its reduction"),
        ("F0 B0 F0 B0", "deferred twice"),
    ],
)
def test_passes_that_are_missing_or_run_twice_are_refused(order: str, message: str) -> None:
    values = tiny_values("data.global_batch=1")
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(lambda world: run_step(make_rig(world, values), 1, order), 1)


def waiting(world: World, values: dict[str, Any], order: str) -> tuple[dict[str, int], int]:
    """Return the bytes that wait after each pass, and how many factors live after the last."""
    rig = make_rig(world, values)
    found: dict[str, int] = {}
    alive: list[Any] = []
    deferred = rig.states.passes.deferred

    def after(action: str) -> None:
        factors = [t for q in deferred._queues.values() for item in q for t in item.operands]
        storages = [tensor.untyped_storage() for tensor in factors]
        found[action] = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        if action[0] == "B":
            alive.extend(map(weakref.ref, factors))

    run_step(rig, 1, order, after)
    return found, sum(reference() is not None for reference in alive)


def test_waiting_bytes_are_those_of_the_factors() -> None:
    model, order = ["model.tied=false", "model.layers=2", "data.global_batch=4"], ORDERS["two wait"]
    ((found, alive),) = run_ranks(waiting, 1, tiny_values(*model), order)
    hidden, layers, tokens = 32, 2, 16
    inputs = (1 + 1 + 1 + 4) * hidden  # of qkv, proj, up and down
    outputs = (3 + 1 + 4 + 1) * hidden
    small = (outputs + 4 * hidden) * layers  # biases and norms
    matrices = (inputs + outputs) * layers  # the gradient of the head does not wait
    one = 4 * (tokens * matrices + small)
    expected = {"B0": 1, "B1": 2, "W0": 1, "B2": 2, "W1": 1, "B3": 2, "W2": 1, "W3": 0}
    assert {a: n for a, n in found.items() if a[0] in "BW"} == {
        a: n * one for a, n in expected.items()
    }
    assert alive == 0


def test_sequence_parallelism_keeps_parts_of_the_inputs() -> None:
    overrides = ["model.tied=false", "model.layers=2", "data.global_batch=4"]
    (whole_tokens, _), (part, _) = (
        run_ranks(waiting, 2, tiny_values(*overrides, *settings), ORDERS["at once"])[0]
        for settings in (SEQUENCE[:1], SEQUENCE)
    )
    hidden, layers, tokens, width = 32, 2, 16, 4
    halved = layers * (2 * hidden)  # the inputs of qkv and up
    assert whole_tokens["B0"] - part["B0"] == width * tokens * halved / 2


def allocated(world: World, values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return, after each pass, how many units are gathered, and how many have unsent gradients."""
    rig = make_rig(world, values)
    units = [gradients.unit for gradients in rig.states.passes._units]
    found = {}

    def after(action: str) -> None:
        gathered = sum(unit.buffer.untyped_storage().nbytes() > 0 for unit in units)
        unsent = sum(g._packed is not None for g in rig.states.passes._units)
        found[action] = gathered, unsent

    run_step(rig, 1, ORDERS["two wait"], after)
    return found


def test_only_factors_wait() -> None:
    values = tiny_values("model.layers=2", "data.global_batch=8", *factors((2, 2, 2)))
    for found in run_ranks(allocated, 2, values):
        assert {(0, 0)} == {count for action, count in found.items() if action[0] in "BW"}


def split_table(world: World, values: dict[str, Any], passes: int) -> Result:
    """Train; the head and the embedding, of one table, get their gradients in as many passes."""
    rig = make_rig(world, values)
    (chunk,), table = rig.model.chunks, rig.model.records[0]
    assert table.unit == "embedding"
    object.__setattr__(table, "passes", passes)
    embed, cut = chunk.embedding.forward, []

    def embed_apart(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = embed(*args, **kwargs)
        cut.append((out, out.detach().requires_grad_()))
        return cut[-1][1]

    if passes == 2:
        chunk.embedding.forward = embed_apart

    def after(action: str) -> None:
        if passes == 2 and action in ("D1", "D3"):  # the head is two micro-batches ahead
            for out, leaf in cut[-2:]:
                out.backward(leaf.grad)

    return train_in_order(rig, "F0 F1 D0 D1 F2 F3 D2 D3", 0.0, after)


@pytest.mark.parametrize("cut", covering([(1, 1, 2), (1, 2, 2)], [(1, 2, 2)]), ids=str)
def test_a_table_with_two_gradients_per_micro_batch(cut: tuple[int, int, int]) -> None:
    values = tiny_values("model.layers=2", "data.global_batch=8", *factors(cut))
    apart, together = (run_ranks(split_table, 2, values, passes) for passes in (2, 1))
    for mine, theirs in zip(apart, together, strict=True):
        assert mine[3] == theirs[3]
        assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
        for gradient, expected in zip(mine[1], theirs[1], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
