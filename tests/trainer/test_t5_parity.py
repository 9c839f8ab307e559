"""The encoder-decoder in every layout is the same computation as one process."""

from typing import Any

import numpy as np
import pytest

from frontier_llm.launch.world import World
from frontier_llm.sharding.sharded_states import ShardedStates
from tests.ranks import run_ranks
from tests.trainer.test_parity import (
    assemble,
    check,
    compare,
    reference,
    train_and_collect,
    trained,
)
from tests.trainer.test_sharding_parity import factors
from tests.values import TINY_T5, tiny_values

pytestmark = pytest.mark.slow

STEPS = 3
MODEL = [*TINY_T5, "data.micro_batch=2", "data.global_batch=4"]

LAYOUTS = {
    "tensor2": (2, ["parallel.tensor=2"]),
    "tensor2_sequence": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "in_encoder": (2, ["parallel.pipeline=2", "parallel.layers_per_stage=[1,3]"]),
    "at_border": (2, ["parallel.pipeline=2", "parallel.layers_per_stage=[2,2]"]),
    "in_decoder": (2, ["parallel.pipeline=2", "parallel.layers_per_stage=[3,1]"]),
    "pipeline3": (3, ["parallel.pipeline=3", "parallel.layers_per_stage=[1,2,1]"]),
    "chunks2": (2, ["parallel.pipeline=2", "parallel.chunks=2"]),
}
EIGHT = "data.global_batch=8"
"""Two micro-batches on each of two replicas."""
IN_3D = ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout: str) -> None:
    """Layouts of the same size are trained on one set of ranks."""
    size, overrides = LAYOUTS[layout]
    cases = tuple((*MODEL, *other) for ranks, other in LAYOUTS.values() if ranks == size)
    results = trained(size, cases, STEPS)[(*MODEL, *overrides)]
    check(results, overrides, MODEL, STEPS)


@pytest.mark.parametrize(
    ("split", "cut"),
    [
        pytest.param("[1,3]", (1, 1, 2), marks=pytest.mark.exhaustive),
        pytest.param("[2,2]", (1, 2, 2), marks=pytest.mark.exhaustive),
        ("[3,1]", (2, 2, 2)),
    ],
    ids=["zero1", "amsp", "zero3"],
)
def test_cut_states_in_three_dimensions(split: str, cut: tuple[int, int, int]) -> None:
    overrides = [*IN_3D, EIGHT, f"parallel.layers_per_stage={split}", *factors(cut)]
    compare(8, overrides, MODEL, STEPS)


def test_stacks_that_reach_over_four_pieces_on_cut_states() -> None:
    """Tables of relative positions have copies on two chunks of two stages."""
    overrides = ["parallel.pipeline=2", "parallel.chunks=2", EIGHT, *factors((2, 2, 2))]
    compare(4, [*overrides, "model.layers=7", "model.encoder_layers=4"], MODEL, STEPS)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        pytest.param("tensor2_sequence", "selective", marks=pytest.mark.exhaustive),
        ("tensor2_sequence", "full"),
        ("in_encoder", "full"),
    ],
)
def test_recomputation_changes_nothing(layout: str, recompute: str) -> None:
    size, overrides = LAYOUTS[layout]
    values = tiny_values(*MODEL, *overrides, f"recompute={recompute}")
    expected_losses, expected_norms, expected = reference(tuple(MODEL), STEPS)
    results = run_ranks(train_and_collect, size, values, "fp32", STEPS)
    np.testing.assert_allclose(results[0][0], expected_losses, rtol=1e-5)
    np.testing.assert_allclose(results[0][1], expected_norms, rtol=1e-5)
    gradients, whole = assemble([found for _, _, found in results]), assemble([expected])
    for name, gradient in whole.items():
        error = np.linalg.norm(gradients[name] - gradient) / np.linalg.norm(gradient)
        assert error <= 1e-5, f"{name}: relative gradient error {error:.1e}"


@pytest.mark.parametrize(
    "layout",
    [pytest.param([], marks=pytest.mark.exhaustive), LAYOUTS["tensor2_sequence"][1]],
    ids=["one", "sequence"],
)
def test_recomputation_draws_the_same_dropout(layout: list[str]) -> None:
    overrides = [*MODEL, *layout, "model.dropout=0.2", "model.attention_dropout=0.2"]
    size = 2 if layout else 1
    kept, again = (
        run_ranks(train_and_collect, size, tiny_values(*overrides, recompute), "fp32", STEPS)[0][:2]
        for recompute in ("recompute=none", "recompute=full")
    )
    np.testing.assert_allclose(again, kept, rtol=1e-5)
    assert not np.allclose(kept[0], reference(tuple(MODEL), STEPS)[0], rtol=1e-3)


def without_sums_of_copies(world: World, values: dict[str, Any]) -> Any:
    ShardedStates._add_tied = lambda _: None  # type: ignore[method-assign]
    return train_and_collect(world, values, "fp32", STEPS)


def test_copies_that_are_not_added_up_are_noticed() -> None:
    """Negative control: without this, the comparisons above would prove less."""
    values = tiny_values(*MODEL, *LAYOUTS["in_encoder"][1])
    _, norms, _ = run_ranks(without_sums_of_copies, 2, values)[0]
    assert not np.allclose(norms, reference(tuple(MODEL), STEPS)[1], rtol=1e-5, atol=0)


def test_bf16_stays_near_fp32() -> None:
    values = tiny_values(*MODEL, *LAYOUTS["in_decoder"][1])
    losses = run_ranks(train_and_collect, 2, values, "bf16", STEPS)[0][0]
    np.testing.assert_allclose(losses, reference(tuple(MODEL), STEPS)[0], rtol=1e-2)


def test_loss_falls() -> None:
    losses = reference(tuple(MODEL))[0]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
