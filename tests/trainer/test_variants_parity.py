"""The variants of today's models in several layouts are the computation of one process."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from frontier_llm.model import rotary
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.test_parity import check_layout, reference, train_and_collect
from tests.values import GEMMA3, tiny_values

pytestmark = pytest.mark.slow

STEPS = 2
SHARED = [
    "model.layers=2",
    "model.activation=swiglu",
    "model.norm=rmsnorm",
    "model.positions=rotary",
    "model.bias=false",
    "model.kv_heads=2",
    "data.global_batch=4",
]
MODELS = {
    "qwen3_yarn": [
        *SHARED,
        "model.qk_norm=head",
        "model.head_dim=16",
        "model.rotary_scaling=yarn",
        "model.rotary_factor=4",
        "model.rotary_original_length=64",
        "model.window=5",
    ],
    "olmo2_llama3": [
        *SHARED,
        "model.tied=false",
        "model.qk_norm=width",
        "model.norm_placement=output",
        "model.rotary_scaling=llama3",
        "model.rotary_factor=4",
        "model.rotary_original_length=16",
        "model.rotary_fraction=0.5",
        # Adam divides gradients by their size, which enlarges the rounding errors of small ones
        "optimizer.epsilon=1e-3",
    ],
    "gemma3": [
        *GEMMA3,
        "data.global_batch=4",
        "model.attention_softcap=3",
        "optimizer.epsilon=1e-3",
        "optimizer.decayed=[norms,matrices]",
    ],
    "biases_and_bounds": [
        *SHARED,
        "model.qkv_bias=true",
        "model.logit_softcap=2",
        "model.attention_softcap=3",
    ],
}
LAYOUTS = {
    "tensor2_sequence_full": (
        2,
        ["parallel.tensor=2", "parallel.sequence=true", "recompute=full"],
    ),
    "pipeline2_selective": (2, ["parallel.pipeline=2", "recompute=selective"]),
    "tensor2_zero3": (4, ["parallel.tensor=2", "sharding=zero3"]),
    "tensor2_pipeline2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
}


CASES = list(product(LAYOUTS, MODELS))
COVERED = [
    (layout, model)
    for layout, model in CASES
    if (layout in ("tensor2_sequence_full", "tensor2_pipeline2"))
    == (model in ("olmo2_llama3", "gemma3"))
]
"""Each model always runs on tensor parallel ranks and on stages of a pipeline."""


@pytest.mark.parametrize("case", covering(CASES, COVERED), ids="-".join)
def test_layout_equals_one_process(case: tuple[str, str]) -> None:
    check_layout(LAYOUTS, MODELS, *case, STEPS, COVERED)


@pytest.mark.parametrize(
    "key",
    ["norm_placement=input", "zero_centred_norms=false", "scaled_embedding=false",
     "score_width=null", "rotary_local_base=null", "rotary_factor=1", "window=4"],
)  # fmt: skip
def test_each_variant_of_gemma_has_an_effect(key: str) -> None:
    model = MODELS["gemma3"]
    without = reference((*model, f"model.{key}"), STEPS)[0]
    assert not np.allclose(reference(tuple(model), STEPS)[0], without, rtol=1e-5)


@pytest.mark.parametrize("key", ["qk_norm=none", "norm_placement=input", "rotary_fraction=1.0"])
def test_each_variant_has_an_effect(key: str) -> None:
    model = MODELS["olmo2_llama3"]
    without = reference((*model, f"model.{key}"), STEPS)[0]
    assert not np.allclose(reference(tuple(model), STEPS)[0], without, rtol=1e-4)


def test_mean_squares_of_single_ranks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without this, the comparisons above would prove less."""
    model = MODELS["olmo2_llama3"]
    own = SimpleNamespace(all_reduce=lambda means, group: None)
    monkeypatch.setattr(rotary, "dist", own)
    monkeypatch.setattr(rotary, "_width", lambda x, group: x.shape[-1])
    values = tiny_values(*model, "parallel.tensor=2")
    losses = run_ranks(train_and_collect, 2, values, "fp32", STEPS)[0][0]
    assert not np.allclose(losses, reference(tuple(model), STEPS)[0], rtol=1e-5)
