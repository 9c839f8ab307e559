"""Backward passes that compute the gradients of weights later, against whole backward passes."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from frontier_llm.launch.world import World
from frontier_llm.model.linear import _Linear
from frontier_llm.sharding.deferred_gradients import DeferredGradients
from frontier_llm.sharding.gradients import Gradients
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit_gradients import UnitGradients
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
"""Forward passes (F), whole backward passes (D), and their parts: gradients of the inputs (B) and of
the weights (W), of four micro-batches."""
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
    rig.groups.seed_dropout(0, step)
    states.begin_step(step, len(batches))
    for action in order.split():
        kind, number = action[0], int(action[1:])
        batch = batches[number]
        if kind == "F":
            loss = batch.mean_loss(chunk(**batch.inputs(), labels=batch.labels))
            losses[number] = loss / (len(batches) * rig.groups.grid.data)
        elif kind == "W":
            states.weight_gradients(0, number)
        else:
            context: AbstractContextManager[None] = nullcontext()
            if kind == "B":
                context = states.defer_weights(0, number)
            with context:
                losses.pop(number).backward()
        after(action)
    states.finish_backward()
    return states.squared_norm()


def train(
    world: World, values: dict[str, Any], precision: str, order: str, mutation: Any = None
) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor], list[Any]]:
    """Return norms, the last gradients, this rank's states, and the bytes that were sent."""
    if mutation is not None:
        mutate(*mutation)
    rig = make_rig(world, values, precision)
    norms, sent = [], []
    for step in range(1, STEPS + 1):
        norms.append(run_step(rig, step, order).item())
        gradients = [gradient.clone() for _, _, gradient in rig.states.gradients()]
        rig.states.update(1e-3, torch.ones(()))
        rig.states.refresh()
        rig.states.settle()
        sent.append(rig.traffic.take())
    shards = [state for s in rig.states.shards() for state in (s.master, s.exp_avg, s.exp_avg_sq)]
    return norms, gradients, [state.clone() for state in shards], sent


def run(case: str, order: str, mutation: Any = None) -> Any:
    ranks, values, precision = values_of(case)
    return run_ranks(
        train, ranks, values, precision, ORDERS[order], mutation, ranks_per_node=1, timeout=120
    )


WHOLE: dict[str, Any] = {}


def whole(case: str) -> Any:
    if case not in WHOLE:
        WHOLE[case] = run(case, "whole")
    return WHOLE[case]


def differs(case: str, order: str, mutation: Any = None) -> bool:
    """Return whether a rank's numbers, states or bytes differ in any bit from whole passes."""
    for mine, theirs in zip(run(case, order, mutation), whole(case), strict=True):
        if mine[0] != theirs[0] or mine[3] != theirs[3]:
            return True
        for tensors, expected in zip(mine[1:3], theirs[1:3], strict=True):
            if not all(map(torch.equal, tensors, expected)):
                return True
    return False


@pytest.mark.parametrize("order", ["at once", "two wait", "all wait", "some whole"])
@pytest.mark.parametrize("case", CASES)
def test_deferred_gradients_equal_those_of_whole_passes_in_every_bit(case: str, order: str) -> None:
    assert not differs(case, order)


@pytest.mark.parametrize("case", ["tied", "(1, 2, 2)", "sequence", "t5, full"])
def test_another_order_of_micro_batches_differs_by_rounding_only(case: str) -> None:
    for mine, theirs in zip(run(case, "last first"), whole(case), strict=True):
        assert mine[3] == theirs[3]
        assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
        for gradient, expected in zip(mine[1], theirs[1], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


MISTAKES: dict[str, tuple[str, Any]] = {
    "a parameter's products are left out": (
        "tied",
        (DeferredGradients.run, "queue.popleft().finish()", "queue.pop().finish(); queue.clear()"),
    ),
    "products of another micro-batch": (
        "tied",
        (DeferredGradients.run, "self._queues[key]\n", "self._queues[max(self._queues)]\n"),
    ),
    "parts of the tokens": (
        "sequence",
        (DeferredGradients.put, "(tensors, add, gather)", "(tensors, add, None)"),
    ),
    "the unit is released before the gradient of the inputs": (
        "one unit in flight",
        (
            _Linear.backward,
            "grad_inputs = grad.matmul(weight)",
            "ctx.sink(grad.flatten(0, -2), inputs.flatten(0, -2)); grad_inputs = grad @ weight",
        ),
    ),
    "one gradient of the unit is enough for its reduction": (
        "(1, 2, 2)",
        (UnitGradients.note_added, "min(counts)", "max(counts)"),
    ),
    "the reduction of the first micro-batch is the last": (
        "(1, 1, 2)",
        (
            UnitGradients.note_added,
            "> self._micro_batches - self.reductions_left",
            "> 0",
        ),
    ),
    "factors count as gradients": (
        "(1, 2, 2)",
        (Gradients.take, "if not defer:", "if True:"),
    ),
    "a micro-batch is not expected": (
        "(1, 2, 2)",
        (ShardedStates.begin_step, "begin_step(micro_batches)", "begin_step(micro_batches - 1)"),
    ),
}
"""By name: the case that notices, and the change of the source."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake: str) -> None:
    case, mutation = MISTAKES[mistake]
    whole(case)
    try:
        assert differs(case, "two wait", mutation)
    except RanksFailedError as error:
        assert "Traceback" in str(error)  # not only a time limit


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
    deferred = rig.states._gradients.deferred

    def after(action: str) -> None:
        found[action] = rig.states.waiting_bytes
        if action[0] == "B":
            queues = deferred._queues.values()
            alive.extend(weakref.ref(t) for q in queues for item in q for t in item.tensors)

    run_step(rig, 1, order, after)
    return found, sum(reference() is not None for reference in alive)


def test_waiting_bytes_are_those_of_the_factors() -> None:
    model, order = ["model.tied=false", "model.layers=2", "data.global_batch=4"], ORDERS["two wait"]
    ((found, alive),) = run_ranks(waiting, 1, tiny_values(*model), order)
    hidden, vocabulary, layers, tokens = 32, 128, 2, 16
    inputs = (1 + 1 + 1 + 4) * hidden  # of qkv, proj, up and down
    outputs = (3 + 1 + 4 + 1) * hidden
    small = (outputs + 4 * hidden) * layers  # biases and norms
    matrices = (inputs + outputs) * layers + hidden + vocabulary
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
    halved = layers * (2 * hidden) + hidden  # the inputs of qkv, up and head
    assert whole_tokens["B0"] - part["B0"] == width * tokens * halved / 2
