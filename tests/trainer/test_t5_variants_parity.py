"""Encoder-decoders of all variants in several layouts are the computation of one process."""

from itertools import product

import pytest

from tests.covering import covering
from tests.trainer.test_parity import check_layout
from tests.trainer.test_t5_parity import MODEL
from tests.values import T5GEMMA

pytestmark = pytest.mark.slow

STEPS = 2
MODELS = {
    "rotary": [
        *MODEL, "model.positions=rotary", "model.scaled_attention=true",
        "model.kv_heads=2", "model.qk_norm=head", "model.window=5", "model.window_every=2",
        "model.attention_softcap=3", "model.logit_softcap=2", "model.qkv_bias=true",
    ],
    "outputs": [
        *MODEL, "model.norm_placement=output", "model.qk_norm=width", "model.tied=true",
        "model.window=6", "optimizer.epsilon=1e-3",
    ],
    "t5gemma": [*MODEL, *T5GEMMA, "optimizer.epsilon=1e-3"],
    "parallel": [*MODEL, "model.residual=parallel", "model.bias=true", "model.tied=true"],
}  # fmt: skip
LAYOUTS = {
    "tensor2_sequence_full": (
        2, ["parallel.tensor=2", "parallel.sequence=true", "recompute=full"],
    ),
    "in_decoder_selective": (
        2, ["parallel.pipeline=2", "parallel.layers_per_stage=[3,1]", "recompute=selective"],
    ),
    "chunks2": (2, ["parallel.pipeline=2", "parallel.chunks=2"]),
    "tensor2_pipeline2_sequence": (
        4, ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"],
    ),
    "tensor2_zero3": (4, ["parallel.tensor=2", "sharding=zero3"]),
}  # fmt: skip


CASES = list(product(LAYOUTS, MODELS))
COVERED = [
    (layout, model)
    for layout, model in CASES
    if (layout in ("tensor2_sequence_full", "chunks2", "tensor2_zero3"))
    == (model in ("outputs", "parallel"))
]
"""Each model always runs on tensor parallel ranks and on stages of a pipeline."""


@pytest.mark.parametrize("case", covering(CASES, COVERED), ids="-".join)
def test_layout_equals_one_process(case: tuple[str, str]) -> None:
    check_layout(LAYOUTS, MODELS, *case, STEPS, COVERED)
