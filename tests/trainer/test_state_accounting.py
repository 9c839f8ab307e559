"""Bytes of model states, stored and sent: predicted by geometry, counted, really sent."""

from typing import Any

import pytest

from frontier_lab.planning.state_traffic import StateTraffic
from frontier_lab.planning.unit_gathers import count_gathers
from frontier_llm.geometry.wire import Sent
from frontier_llm.launch.world import World
from tests.covering import exhaustive
from tests.ranks import in_turn, run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_sharding_parity import chains, factors
from tests.trainer.test_traffic import SeenCalls
from tests.values import SIDES, T5GEMMA, T5GEMMA2, THREE_LEVELS, TINY_T5, tiny_values

pytestmark = pytest.mark.slow

FLOWS = ("gather_params", "reduce_grads", "reduce_states", "refresh_params")
TELLING = [(1, 1, 4), (1, 2, 4), (2, 4, 4), (4, 4, 4)]
"""Chains in which each flow has a hop of its own."""
REPLICATED = [(1, 1, 1), (1, 1, 2), (2, 2, 2)]
"""Chains with replicas of the optimizer states: on two nodes, and on both nodes."""
SOME_OF_TWO = [(1, 1, 2), (2, 2, 2)]
"""Chains of two replicas for optimizers, which other layouts have with every chain."""
FEW = "model.layers=3"
"""The first layer, the last one, and one between them."""
LAYOUTS = {
    "data4": (4, [FEW]),
    "untied": (4, ["model.tied=false", "model.positions=rotary", FEW]),
    "recompute": (4, ["recompute=full", FEW]),
    "three_in_flight": (4, ["sharding.units_in_flight=3", "model.layers=6"]),
    "one_in_flight": (4, ["sharding.units_in_flight=1", "model.tied=false", FEW]),
    "pipeline2_data4": (8, ["parallel.pipeline=2", "data.global_batch=12"]),
    "pipeline2_chunks2_tensor2_data2": (
        8, ["parallel.pipeline=2", "parallel.chunks=2", "parallel.tensor=2"],
    ),
    "t5gemma_data4": (4, [*T5GEMMA]),
    "t5gemma2_data4": (4, [*T5GEMMA2]),
    "sides_pipeline3_data2": (6, [*SIDES, "parallel.pipeline=3"]),
    "t5_pipeline2_tensor2_data2": (
        8, [*TINY_T5, "parallel.pipeline=2", "parallel.tensor=2", "data.micro_batch=2"],
    ),
}  # fmt: skip
FORMATS = {
    "plain": [],
    "zeropp": [
        "collectives=zeropp", "collectives.grads_format=int8", "collectives.block_elements=32",
        "collectives.params_backward_format=bf16",
    ],
    "zeropp_feedback": [
        "collectives=zeropp_feedback", "collectives.grads_format=int8",
        "collectives.scales_format=fp32",
    ],
    "four_bits": ["collectives=four_bits", "collectives.sums_format=int8"],
    "sums_bf16": ["collectives.sums_format=bf16"],
    "adamw_8bit": ["optimizer.name=adamw_8bit"],
    "muon": ["optimizer.name=muon"],
    "adafactor": ["optimizer.name=adafactor", "optimizer.beta1=0"],
    "sums_int4": [
        "collectives=zeropp_feedback", "collectives.sums_format=int4",
        "collectives.block_elements=64",
    ],
}  # fmt: skip


BY_LEVEL = [
    "collectives=zeropp_feedback",
    "collectives.formats={package: bf16, node: int8, network: int4}",
]


def account(world: World, values: dict[str, Any], precision: str) -> dict[str, Any]:
    rig = make_rig(world, values, precision)
    layout, stage = rig.model.layout, rig.groups.coordinates.pipeline
    rig.train(1)
    rig.traffic.take()
    taken: dict[str, Any] = {}
    take = rig.traffic.take
    rig.traffic.take = lambda: taken.setdefault("sent", take())  # type: ignore[method-assign]
    with SeenCalls() as seen:
        rig.step.run(2, rig.batches(1), 1e-3)
    counted = taken["sent"]
    for name, sent in take().items():  # the refresh comes after the totals
        counted[name] = counted.get(name, Sent()) + sent
    assert layout.compute_bytes == rig.model.transformer.params_dtype.itemsize
    traffic = StateTraffic(
        layout.grid,
        layout.factors,
        layout.micro_batches,
        layout.compute_bytes,
        pairs=True,
        formats=layout.formats,
    )
    gathers = count_gathers(layout, stage)
    predicted: dict[str, Sent] = {}
    for unit, buffer in layout.unit_layouts(stage).items():
        sent = traffic.unit(world.rank, buffer.size, gathers[unit], buffer.decayed, buffer.bounds)
        for name, one in sent.items():
            predicted[name] = predicted.get(name, Sent()) + one
    memory = layout.state_bytes(stage, rig.groups.coordinates.data)
    assert layout.saved_bytes(stage, rig.groups.coordinates.data) == rig.states.saved_bytes
    return {
        "predicted": {name: predicted.get(name, Sent()) for name in FLOWS},
        "counted": {name: counted.get(name, Sent()) for name in FLOWS},
        "seen": sum(seen.bytes_by_group.values()),
        "all_counted": sum(s.total for s in counted.values()),
        "memory": (memory, rig.states.memory_bytes()),
    }


@pytest.mark.parametrize(
    ("layout", "precision", "collectives"),
    [
        ("data4", "fp32", "plain"),
        pytest.param("data4", "bf16", "plain", marks=pytest.mark.exhaustive),
        *exhaustive(
            ("untied", "bf16", "plain"),
            ("recompute", "fp32", "plain"),
            ("three_in_flight", "fp32", "plain"),
        ),
        pytest.param("one_in_flight", "fp32", "plain", marks=pytest.mark.exhaustive),
        pytest.param("pipeline2_data4", "bf16", "plain", marks=pytest.mark.exhaustive),
        pytest.param(
            "pipeline2_chunks2_tensor2_data2", "fp32", "plain", marks=pytest.mark.exhaustive
        ),
        *exhaustive(("t5gemma_data4", "fp32", "plain")),
        *exhaustive(("t5gemma2_data4", "fp32", "plain")),
        pytest.param("t5_pipeline2_tensor2_data2", "fp32", "plain", marks=pytest.mark.exhaustive),
        *exhaustive(("untied", "bf16", "zeropp_feedback")),
        pytest.param("recompute", "fp32", "zeropp", marks=pytest.mark.exhaustive),
        ("pipeline2_chunks2_tensor2_data2", "fp32", "zeropp"),
        pytest.param("data4", "bf16", "sums_bf16", marks=pytest.mark.exhaustive),
        ("data4", "bf16", "four_bits"),
        *exhaustive(("untied", "fp32", "sums_int4")),
        *exhaustive(("untied", "bf16", "muon")),
        *exhaustive(("untied", "bf16", "adamw_8bit")),
        *exhaustive(("pipeline2_chunks2_tensor2_data2", "fp32", "muon")),
        ("t5_pipeline2_tensor2_data2", "bf16", "adafactor"),
    ],
)
def test_predicted_is_counted_is_sent(layout: str, precision: str, collectives: str) -> None:
    size, overrides = LAYOUTS[layout]
    data = 2 if "tensor=2" in str(overrides) else 4
    selected = chains(data) if data == 2 else TELLING
    if collectives == "plain" and layout == "data4":
        selected = chains(data) if precision == "bf16" else [*TELLING, *REPLICATED]
    if data == 2 and collectives in ("muon", "adafactor"):
        selected = SOME_OF_TWO
    if collectives.startswith("sums"):
        selected = REPLICATED
    elif collectives not in ("plain", "muon", "adafactor", "adamw_8bit"):
        selected = selected[1:3]
    formats = [f"collectives.grads_format={precision}", *FORMATS[collectives]]
    cases = [(tiny_values(*overrides, *factors(chain), *formats), precision) for chain in selected]
    for rank in run_ranks(in_turn, size, account, cases, ranks_per_node=2):
        for chain, found in zip(selected, rank, strict=True):
            check(found, chain)


def check(found: dict[str, Any], chain: tuple[int, int, int]) -> None:
    """Compare what was predicted, what was counted and what was sent."""
    assert found["counted"] == found["predicted"], chain
    assert found["seen"] == found["all_counted"], chain
    predicted, allocated = found["memory"]
    assert 0 <= allocated.pop("gathered") <= predicted.pop("gathered"), chain
    assert allocated.pop("messages", 0) <= predicted.pop("messages", 0), chain
    assert predicted == allocated, chain


CUT, LESS_CUT = [(2, 4, 8), (8, 8, 8)], [(1, 1, 1), (1, 1, 8)]


@pytest.mark.parametrize(
    ("formats", "selected"),
    [(BY_LEVEL, CUT), *exhaustive((BY_LEVEL, LESS_CUT), ([], [*LESS_CUT, *CUT]))],
    ids=["by level", "by level, less cut", "plain"],
)
def test_bytes_are_predicted_at_each_of_three_levels(
    formats: list[str], selected: list[tuple[int, int, int]]
) -> None:
    overrides = [*THREE_LEVELS, "data.global_batch=16", FEW, *formats]
    cases = [(tiny_values(*overrides, *factors(chain)), "fp32") for chain in selected]
    for rank in run_ranks(in_turn, 8, account, cases, ranks_per_node=4):
        for chain, found in zip(selected, rank, strict=True):
            check(found, chain)
            if chain == (8, 8, 8):
                gathered = found["counted"]["gather_params"]
                assert gathered.package > gathered.node > gathered.network > 0


def message_bytes(world: World, values: dict[str, Any]) -> tuple[int, int]:
    rig = make_rig(world, values, "fp32")
    rig.train(2)
    stage = rig.groups.coordinates.pipeline
    planned = rig.model.layout.state_bytes(stage, rig.groups.coordinates.data)["messages"]
    return planned, rig.states.memory_bytes()["messages"]


def test_units_of_similar_sizes_share_message_buffers() -> None:
    """The head and the embedding have 95% of the elements of a layer."""
    sizes = ["model.layers=6", "model.hidden=64", "model.vocabulary=742", "model.tied=false"]
    values = tiny_values(*sizes, "collectives=zeropp", "sharding=zero3", "data.vocabulary=742")
    for planned, allocated in run_ranks(message_bytes, 2, values):
        assert allocated <= planned <= 1.1 * allocated
