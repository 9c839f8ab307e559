"""Encoder-decoders with unequal sides, or with merged attention, compute what one process does."""

from itertools import product

import pytest

from tests.covering import covering, exhaustive
from tests.trainer.test_parity import check_layout, compare
from tests.trainer.test_sharding_parity import factors
from tests.trainer.test_t5_parity import EIGHT, IN_3D, MODEL
from tests.values import SIDES, T5GEMMA2

pytestmark = pytest.mark.slow

STEPS = 2
MODELS = {
    "sides": [*MODEL, *SIDES, "optimizer.epsilon=1e-3"],
    "t5gemma2": [*MODEL, *T5GEMMA2, "optimizer.epsilon=1e-3"],
}
LAYOUTS = {
    "tensor2_sequence_full": (
        2, ["parallel.tensor=2", "parallel.sequence=true", "recompute=full"],
    ),
    "in_encoder": (2, ["parallel.pipeline=2", "parallel.layers_per_stage=[1,3]"]),
    "at_border_zero_bubble": (
        2, ["parallel.pipeline=2", "parallel.layers_per_stage=[2,2]", "parallel.schedule=zb_h1"],
    ),
    "in_decoder_selective": (
        2, ["parallel.pipeline=2", "parallel.layers_per_stage=[3,1]", "recompute=selective"],
    ),
    "chunks2": (2, ["parallel.pipeline=2", "parallel.chunks=2"]),
    "folded": (2, ["parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=zb_v"]),
    "pipeline3": (3, ["parallel.pipeline=3", "parallel.layers_per_stage=[1,2,1]"]),
    "pipeline4": (4, ["parallel.pipeline=4"]),
    "tensor2_sequence_pipeline2": (4, [*IN_3D, "parallel.layers_per_stage=[1,3]"]),
}  # fmt: skip


ALONE = ("at_border_zero_bubble", "in_decoder_selective", "tensor2_sequence_pipeline2")
"""Layouts that always run with merged attention; the others do with unequal sides."""
CASES = list(product(LAYOUTS, MODELS))
COVERED = [(layout, model) for layout, model in CASES if (layout in ALONE) != (model == "t5gemma2")]


@pytest.mark.parametrize("case", covering(CASES, COVERED), ids="-".join)
def test_layout_equals_one_process(case: tuple[str, str]) -> None:
    check_layout(LAYOUTS, MODELS, *case, STEPS, COVERED)


AMSP, ZERO3 = (1, 2, 2), (2, 2, 2)


@pytest.mark.parametrize(
    ("cut", "model"),
    [
        (AMSP, "t5gemma2"), (ZERO3, "sides"), *exhaustive((AMSP, "sides"), (ZERO3, "t5gemma2")),
    ],
)  # fmt: skip
def test_cut_states_in_three_dimensions(cut: tuple[int, int, int], model: str) -> None:
    overrides = [*IN_3D, EIGHT, "parallel.layers_per_stage=[3,1]", *factors(cut)]
    compare(8, overrides, MODELS[model], STEPS)
