"""The activations of whole steps, as the allocator counts them, are those of the plan."""

import pytest

from frontier_llm.planner.block import stage_activations
from tests.planner.layouts import make
from tests.planner.step_peak import measure_peak
from tests.ranks import run_ranks
from tests.values import TINY_T5, tiny_values

SIZES = (
    "model.hidden=128", "model.ffn=256", "model.heads=4", "model.head_dim=32", "model.layers=8",
    "data.sequence_length=256", "data.micro_batch=1", "data.global_batch=1", "parallel.pipeline=1",
    "sharding=replicated", "recompute=none",
)  # fmt: skip
T5 = (*TINY_T5, "model.encoder_layers=4", "data.vocabulary=28")
MODELS = {
    "layernorm": (),
    "rmsnorm": ("model.norm=rmsnorm", "model.activation=swiglu"),
    "encoder-decoder": T5,
    "merged encoder-decoder": (
        *T5,
        "model.positions=rotary",
        "model.kv_heads=2",
        "model.qk_norm=head",
        "model.cross_attention=merged",
    ),
    "rotary encoder-decoder": (*T5, "model.positions=rotary", "model.kv_heads=2"),
    "unequal sides": (
        *T5,
        "model.positions=rotary",
        "model.encoder_embedding=true",
        "model.encoder_hidden=320",
        "model.encoder_heads=8",
        "model.encoder_kv_heads=4",
        "model.encoder_ffn=800",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_what_a_step_keeps_is_planned(model):
    """Within 5%: RMSNorm on a CPU keeps a third tensor, and each stack ends with a norm."""
    values = (*MODELS[model], *SIZES)
    candidate = make(*values, "cluster=cpu_laptop", "precision=fp32", ranks=1)
    planned = stage_activations(candidate, 0, candidate.stages.kinds[0])
    (measured,) = run_ranks(measure_peak, 1, tiny_values(*values))
    assert planned.kept == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["[4,4]", "[6,2]"])
def test_a_stage_of_the_decoder_keeps_the_encoders_output(split):
    values = (
        *MODELS["unequal sides"], *SIZES, "parallel.pipeline=2", "parallel.schedule=1f1b",
        f"parallel.layers_per_stage={split}",
    )  # fmt: skip
    candidate = make(*values, "cluster=cpu_laptop", "precision=fp32", ranks=2)
    planned = stage_activations(candidate, 1, candidate.stages.by_stage[1])
    _, measured = run_ranks(measure_peak, 2, tiny_values(*values))
    assert planned.kept == pytest.approx(measured, rel=0.05)
