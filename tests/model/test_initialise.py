"""Initial weights depend on the seed and the name, and on nothing else."""

from typing import Any

import numpy as np
import pytest

from frontier_llm.launch.world import World
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import assemble
from tests.values import TINY_T5, tiny_values

SWIGLU = ["model.activation=swiglu", "model.vocabulary=4099", "model.tied=false"]


def weights(world: World, values: dict[str, Any]) -> dict[str, Any]:
    rig = make_rig(world, values)
    found: dict[str, Any] = {}
    for record in rig.model.records:
        local = record.parameter.detach()
        covered = 0
        for placement in record.placements:
            piece = placement.local_view(local)
            covered += piece.numel()
            entry = found.setdefault(placement.name, (placement.global_shape, []))
            entry[1].append((placement.global_start, piece.numpy().copy()))
        padding = local.numel() - covered
        assert int((local == 0).sum()) >= padding, f"{record.name}: padding is not zero"
    return found


@pytest.mark.parametrize(("size", "layout"), [
    (2, ["parallel.tensor=2"]),
    (2, ["parallel.pipeline=2", "parallel.chunks=2"]),
    (8, ["parallel.tensor=4", "parallel.pipeline=2"]),
])  # fmt: skip
@pytest.mark.parametrize("model", [SWIGLU, TINY_T5], ids=["gpt", "t5"])
def test_every_layout_starts_with_the_same_model(
    size: int, layout: list[str], model: list[str]
) -> None:
    whole = assemble(run_ranks(weights, 1, tiny_values(*model)))
    cut = assemble(run_ranks(weights, size, tiny_values(*model, *layout)))
    assert whole.keys() == cut.keys()
    for name, expected in whole.items():
        np.testing.assert_array_equal(cut[name], expected, err_msg=name)


def test_seed_changes_it_and_deviation_is_as_configured() -> None:
    one, other = (
        assemble(run_ranks(weights, 1, tiny_values(*SWIGLU, f"trainer.seed={seed}")))
        for seed in (1, 2)
    )
    name = "layers.2.ffn.up.weight"
    assert not np.array_equal(one[name], other[name])
    assert not np.array_equal(one[name], one["layers.3.ffn.up.weight"])
    assert one[name].std() == pytest.approx(0.1, rel=0.05)
    assert one["layers.2.ffn.down.weight"].std() == pytest.approx(0.1 / 8**0.5, rel=0.05)


def test_a_t5_starts_with_scores_and_outputs_of_deviation_one() -> None:
    """Its scores are not scaled, so its queries are drawn small."""
    values = tiny_values(*TINY_T5, "model.hidden=64", "model.ffn=128", "model.head_dim=16")
    grouped = assemble(run_ranks(weights, 1, values | {"model": values["model"] | {"kv_heads": 2}}))
    qkv = grouped["layers.1.attention.qkv.weight"].reshape(2, 4, 16, 64)
    assert qkv[:, :2].std() == pytest.approx((64 * 16) ** -0.5, rel=0.05)
    assert qkv[:, 2:].std() == pytest.approx(64**-0.5, rel=0.05)
    found = assemble(run_ranks(weights, 1, values))
    qkv = found["layers.1.attention.qkv.weight"].reshape(4, 3, 16, 64)
    assert qkv[:, 0].std() == pytest.approx((64 * 16) ** -0.5, rel=0.05)
    assert qkv[:, 1:].std() == pytest.approx(64**-0.5, rel=0.05)
    for name, deviation in {
        "embedding.tokens.weight": 1.0,
        "head.weight": 64**-0.5,
        "encoder_positions.weight": 64**-0.5,
        "layers.3.cross_attention.query.weight": (64 * 16) ** -0.5,
        "layers.3.cross_attention.key_value.weight": 64**-0.5,
        "layers.3.cross_attention.output.weight": 64**-0.5,
        "layers.3.ffn.down.weight": 128**-0.5,
    }.items():
        assert found[name].std() == pytest.approx(deviation, rel=0.2), name


def test_an_encoder_of_other_dimensions_starts_with_its_own_deviations() -> None:
    values = tiny_values(
        *TINY_T5, "model.encoder_embedding=true", "model.scaled_embedding=true",
        "model.encoder_hidden=96", "model.encoder_heads=8", "model.encoder_kv_heads=2",
        "model.encoder_head_dim=16", "model.encoder_ffn=200", "model.relative_buckets=32",
        "model.relative_distance=64",
    )  # fmt: skip
    found = assemble(run_ranks(weights, 1, values))
    qkv = found["layers.1.attention.qkv.weight"].reshape(2, 6, 16, 96)
    assert qkv[:, :4].std() == pytest.approx((96 * 16) ** -0.5, rel=0.05)
    assert qkv[:, 4:].std() == pytest.approx(96**-0.5, rel=0.05)
    for name, deviation in {
        "encoder_embedding.tokens.weight": 96**-0.5,
        "embedding.tokens.weight": 32**-0.5,
        "encoder_positions.weight": 96**-0.5,
        "decoder_positions.weight": 32**-0.5,
        "layers.1.ffn.down.weight": 200**-0.5,
        "layers.1.attention.output.weight": 128**-0.5,
        "layers.3.cross_attention.query.weight": (32 * 8) ** -0.5,
        "layers.3.cross_attention.key_value.weight": 96**-0.5,
    }.items():
        assert found[name].std() == pytest.approx(deviation, rel=0.2), name
