"""What megatron builds is what geometry/inventory.py says, on every rank of every layout."""

import math
from typing import Any

import pytest

from frontier_llm.geometry.inventory import chunk_parameters, count_parameters
from frontier_llm.launch.world import World
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.values import GEMMA3, SIDES, T5GEMMA, T5GEMMA2, TINY_T5, tiny_values

VARIANTS = {
    "gpt2": [],
    "llama": [
        "model.tied=false", "model.kv_heads=2", "model.activation=swiglu", "model.norm=rmsnorm",
        "model.positions=rotary", "model.bias=false",
    ],
    "norms_over_ranks": [
        "model.kv_heads=2", "model.qk_norm=width", "model.norm_placement=output",
        "model.norm=rmsnorm", "model.bias=false", "model.qkv_bias=true",
    ],
    "prime_vocabulary": ["model.vocabulary=4099"],
    "narrow_heads": ["model.head_dim=6", "model.qk_norm=head"],
    "gemma3": [*GEMMA3, "model.layers=4"],
    "t5": list(TINY_T5),
    "t5gemma": list(T5GEMMA),
    "t5gemma2": list(T5GEMMA2),
    "sides": list(SIDES),
}  # fmt: skip


def describe(world: World, values: dict[str, Any]) -> list[tuple[str, str, Any, Any, bool, bool]]:
    rig = make_rig(world, values)
    length = rig.config.data.sequence_length
    expected = {
        shape.name
        for chunk in rig.model.layout.chunks_of_stage(rig.groups.coordinates.pipeline)
        for shape in chunk_parameters(rig.config.model, chunk, length)
    }
    found = {p.name for record in rig.model.records for p in record.placements}
    assert found == expected
    shapes = {
        shape.name: shape
        for chunk in rig.model.layout.model_chunks
        for shape in chunk_parameters(rig.config.model, chunk, length)
    }
    for record in rig.model.records:
        for placement in record.placements:
            assert placement.global_shape == shapes[placement.name].shape
            assert record.group == shapes[placement.name].group
    return [
        (p.name, record.unit, p.global_start, p.shape, record.counted, record.group)
        for record in rig.model.records
        for p in record.placements
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("size", "layout"), [
    (1, []),
    (2, ["parallel.tensor=2"]),
    (4, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2"]),
])  # fmt: skip
def test_counted_parts_are_the_whole_model_once(size: int, layout: list[str], variant: str) -> None:
    values = tiny_values(*layout, *VARIANTS[variant])
    ranks = run_ranks(describe, size, values)
    counted = sum(math.prod(part[3]) for parts in ranks for part in parts if part[4])
    from frontier_llm.config.run import RunConfig

    config = RunConfig.model_validate(values)
    assert counted == count_parameters(config.model, config.data.sequence_length)


def test_biases_and_norms_are_a_group() -> None:
    for name, _, _, _, _, group in run_ranks(describe, 1, tiny_values())[0]:
        assert (group == "norms") == (name.endswith(".bias") or "norm" in name), name


def fused_rows(world: World, values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {record.name: record.fused for record in make_rig(world, values).model.records}


def test_fused_rows_are_those_of_the_side() -> None:
    (found,) = run_ranks(fused_rows, 1, tiny_values(*SIDES))
    assert found["layers.1.attention.qkv.weight"] == (36, 12, 12)
    assert found["layers.2.attention.qkv.weight"] == (16, 8, 8)
    assert found["layers.2.cross_attention.key_value.weight"] == (8, 8)
