"""Bytes of model states, stored and sent: predicted by geometry, counted, really sent."""

from typing import Any

import pytest

from frontier_llm.geometry.layout import predict_bytes, resolve_factors
from frontier_llm.geometry.state_traffic import StateTraffic
from frontier_llm.geometry.units import gathers, unit_elements
from frontier_llm.geometry.wire import Sent
from frontier_llm.parallel.world import World
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_sharding_parity import chains, factors
from tests.trainer.test_traffic import SeenCalls
from tests.values import tiny_values

FLOWS = ("gather_params", "reduce_grads", "reduce_states", "refresh_params")
TELLING = [(1, 1, 4), (1, 2, 4), (2, 4, 4), (4, 4, 4)]
"""Chains in which each flow has a hop of its own."""
LAYOUTS = {
    "data4": (4, []),
    "untied": (4, ["model.tied=false", "model.positions=rotary", "model.layers=3"]),
    "recompute": (4, ["recompute=full"]),
    "pipeline2_data4": (8, ["parallel.pipeline=2", "data.global_batch=12"]),
    "pipeline2_chunks2_tensor2_data2": (
        8, ["parallel.pipeline=2", "parallel.chunks=2", "parallel.tensor=2"],
    ),
}  # fmt: skip


def account(world: World, values: dict[str, Any], precision: str) -> dict[str, Any]:
    rig = make_rig(world, values, precision)
    config, grid, at = rig.config, rig.groups.grid, rig.groups.at
    cut = resolve_factors(config, grid)
    units = unit_elements(config, at.pipeline, cut)
    rig.train(1)
    rig.traffic.take()
    taken: dict[str, Any] = {}
    take = rig.traffic.take
    rig.traffic.take = lambda: taken.setdefault("sent", take())  # type: ignore[method-assign]
    with SeenCalls() as seen:
        rig.step.run(2, rig.batches(1), 1e-3, stop=False)
    counted = taken["sent"]
    for name, sent in take().items():  # the refresh comes after the totals
        counted[name] = counted.get(name, Sent()) + sent
    element_bytes = rig.model.transformer.params_dtype.itemsize
    wire_bytes = 2.0 if config.collectives.grads_format == "bf16" else 4.0
    micro_batches = len(rig.batches(0))
    traffic = StateTraffic(grid, cut, micro_batches, element_bytes, wire_bytes, pairs=True)
    how_often = gathers(config, at.pipeline, micro_batches)
    predicted: dict[str, Sent] = {}
    for unit, elements in units.items():
        for name, sent in traffic.unit(world.rank, elements, how_often[unit]).items():
            predicted[name] = predicted.get(name, Sent()) + sent
    memory = predict_bytes(config, at.pipeline, cut, element_bytes)
    return {
        "predicted": {name: predicted.get(name, Sent()) for name in FLOWS},
        "counted": {name: counted.get(name, Sent()) for name in FLOWS},
        "seen": sum(seen.bytes_by_group.values()),
        "all_counted": sum(s.intra + s.inter for s in counted.values()),
        "memory": (memory, rig.states.memory_bytes()),
    }


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("data4", "fp32"),
        ("data4", "bf16"),
        ("untied", "bf16"),
        ("recompute", "fp32"),
        ("pipeline2_data4", "bf16"),
        ("pipeline2_chunks2_tensor2_data2", "fp32"),
    ],
)
def test_predicted_is_counted_is_sent(layout: str, precision: str) -> None:
    size, overrides = LAYOUTS[layout]
    data = 2 if "tensor=2" in str(overrides) else 4
    every = layout == "data4" or data == 2
    for chain in chains(data) if every else TELLING:
        values = tiny_values(*overrides, *factors(chain), f"collectives.grads_format={precision}")
        for found in run_ranks(account, size, values, precision, ranks_per_node=2):
            assert found["counted"] == found["predicted"], chain
            assert found["seen"] == found["all_counted"], chain
            predicted, allocated = found["memory"]
            assert 0 <= allocated.pop("gathered") <= predicted.pop("gathered"), chain
            assert predicted == allocated, chain
