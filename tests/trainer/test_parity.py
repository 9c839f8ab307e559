"""Every layout is the same computation: losses and gradients against one process.

Gradients are compared as well as losses because AdamW does not notice a gradient that is wrong
by a factor, and a missing reduction hides in the loss for many steps.
"""

import functools
from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.launch.world import World
from frontier_llm.model import build
from tests.covering import covering
from tests.ranks import in_turn, run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.values import tiny_values

pytestmark = pytest.mark.slow

STEPS = 3
BATCH = ["data.global_batch=4"]
"""Two micro-batches or more on every replica: enough to add up, and half the time of eight."""

IN_LAYOUTS = ("parallel.", "sharding", "kernels=", "attention=")
"""Beginnings of the overrides that one process, with which layouts are compared, does not have."""

LAYOUTS = {
    "tensor2": (2, ["parallel.tensor=2"]),
    "tensor2_sequence": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pipeline2": (2, ["parallel.pipeline=2"]),
    "pipeline2_chunks2": (2, ["parallel.pipeline=2", "parallel.chunks=2"]),
    "data2": (2, []),
    "tensor2_pipeline2_data2": (8, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "tensor2_pipeline2_chunks2_data2": (
        8,
        ["parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2"],
    ),
    "tensor2_sequence_pipeline2_chunks2_data2": (
        8,
        [
            "parallel.tensor=2",
            "parallel.sequence=true",
            "parallel.pipeline=2",
            "parallel.chunks=2",
        ],
    ),
    "pipeline3_uneven": (3, ["parallel.pipeline=3", "parallel.layers_per_stage=[1,1,2]"]),
    "pipeline2_chunks2_uneven": (
        2,
        ["parallel.pipeline=2", "parallel.chunks=2", "model.layers=5"],
    ),
}
MODELS = {
    "tied_gelu": [],
    "untied_gqa_swiglu": [
        "model.tied=false",
        "model.kv_heads=2",
        "model.activation=swiglu",
        "model.norm=rmsnorm",
        "model.positions=rotary",
        "model.bias=false",
    ],
}

COVERED = [
    ("tensor2", "tied_gelu"),
    ("pipeline2", "tied_gelu"),
    ("tensor2_pipeline2_data2", "untied_gqa_swiglu"),
    ("tensor2_pipeline2_chunks2_data2", "tied_gelu"),
    ("tensor2_pipeline2_chunks2_data2", "untied_gqa_swiglu"),
    ("tensor2_sequence_pipeline2_chunks2_data2", "untied_gqa_swiglu"),
]
"""Layouts whose settings other layouts have too, with a model that these have; the last one with
cut states in test_sharding_parity.py."""


def train_and_collect(
    world: World, values: dict[str, Any], precision: str, steps: int = STEPS
) -> tuple[list[float], list[float], dict[str, tuple[tuple[int, ...], list[Any]]]]:
    rig = make_rig(world, values, precision)
    first = rig.train(1)
    gradients = first_gradients(rig)
    results = first + rig.train(steps - 1, first=1)
    return [r.loss for r in results], [r.grad_norm for r in results], gradients


def first_gradients(rig: Rig) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    """Return each global tensor's pieces: (shape, [(start, piece)])."""
    found: dict[str, tuple[tuple[int, ...], list[Any]]] = {}
    clip = rig.config.optimizer.clip_norm
    assert clip is None, "the fused update writes clipped gradients back"
    held: dict[int, np.ndarray] = {}
    for record, start, gradient in rig.states.gradients():
        flat = held.setdefault(
            id(record), np.full(record.parameter.numel(), np.nan, dtype=np.float32)
        )
        flat[start : start + gradient.numel()] = gradient.numpy()
    for record in rig.model.records:
        if id(record) not in held:
            continue  # another data rank holds all of it
        local = torch.from_numpy(held[id(record)]).view(record.parameter.shape)
        for placement in record.placements:
            piece = placement.local_view(local).clone().numpy()
            entry = found.setdefault(placement.name, (placement.global_shape, []))
            entry[1].append((placement.global_start, piece))
    return found


def assemble(per_rank: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Put the pieces of all ranks together; pieces held twice must agree to the last bits."""
    whole: dict[str, np.ndarray] = {}
    for pieces in per_rank:
        for name, (shape, boxes) in pieces.items():
            target = whole.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
            for start, piece in boxes:
                index = tuple(slice(s, s + n) for s, n in zip(start, piece.shape, strict=True))
                here = ~np.isnan(piece)
                twice = here & ~np.isnan(target[index])
                scale = np.abs(piece[here]).max(initial=1e-30)
                assert np.abs(target[index] - piece)[twice].max(initial=0) <= 1e-6 * scale, name
                target[index][here] = piece[here]
    for name, tensor in whole.items():
        assert not np.isnan(tensor).any(), f"{name} is not covered"
    return whole


@functools.cache
def reference(overrides: tuple[str, ...], steps: int = STEPS) -> Any:
    return run_ranks(train_and_collect, 1, tiny_values(*overrides), "fp32", steps)[0]


def compare(size: int, overrides: list[str], model: list[str], steps: int = STEPS) -> None:
    values = tiny_values(*model, *overrides)
    results = run_ranks(train_and_collect, size, values, "fp32", steps, timeout=120)
    check(results, overrides, model, steps)


@functools.cache
def trained(
    size: int, cases: tuple[tuple[str, ...], ...], steps: int = STEPS
) -> dict[tuple[str, ...], list[Any]]:
    """Train each case of overrides on one set of ranks; return what each rank found.

    To fork ranks and to connect them takes about as long as these steps.
    """
    arguments = [(tiny_values(*overrides), "fp32", steps) for overrides in cases]
    by_rank = run_ranks(in_turn, size, train_and_collect, arguments, timeout=120 + 20 * len(cases))
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def check(results: list[Any], overrides: list[str], model: list[str], steps: int) -> None:
    """Compare what `train_and_collect` returned on each rank of a layout with one process."""
    alone = [o for o in overrides if not o.startswith(IN_LAYOUTS)]
    losses_alone, norms_alone, gradients_alone = reference((*model, *alone), steps)
    for losses, norms, _ in results:
        np.testing.assert_allclose(losses, losses_alone, rtol=1e-5)
        np.testing.assert_allclose(norms, norms_alone, rtol=1e-5)
    gradients = assemble([gradients for _, _, gradients in results])
    whole = assemble([gradients_alone])
    assert gradients.keys() == whole.keys()
    for name, expected in whole.items():
        error = np.linalg.norm(gradients[name] - expected) / np.linalg.norm(expected)
        assert error <= 1e-5, f"{name}: relative gradient error {error:.1e}"


@pytest.mark.parametrize("case", covering(product(LAYOUTS, MODELS), COVERED), ids="-".join)
def test_layout_equals_one_process(case: tuple[str, str]) -> None:
    size, overrides = LAYOUTS[case[0]]
    others = [
        other
        for other in product(LAYOUTS, MODELS)
        if LAYOUTS[other[0]][0] == size and (other in COVERED) == (case in COVERED)
    ]
    results = trained(size, tuple(map(overrides_of, others)))[overrides_of(case)]
    check(results, [*overrides, *BATCH], MODELS[case[1]], STEPS)


def overrides_of(case: tuple[str, str]) -> tuple[str, ...]:
    layout, model = case
    return (*MODELS[model], *LAYOUTS[layout][1], *BATCH)


@pytest.mark.parametrize("recompute", covering(["selective", "full"], ["full"]))
@pytest.mark.parametrize(
    "layout",
    covering(["tensor2_sequence", "tensor2_pipeline2_chunks2_data2"], ["tensor2_sequence"]),
)
def test_recomputation_changes_nothing(layout: str, recompute: str) -> None:
    """In test_schedules.py half of the cases of each schedule are recomputed in full."""
    size, overrides = LAYOUTS[layout]
    values = tiny_values(*overrides, *BATCH, f"recompute={recompute}")
    losses = run_ranks(train_and_collect, size, values, "fp32")[0][0]
    np.testing.assert_allclose(losses, reference(tuple(BATCH))[0], rtol=1e-5)


def test_parallel_residual() -> None:
    overrides = ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", *BATCH]
    model = ["model.residual=parallel", "model.activation=gelu_exact", "model.positions=rotary"]
    compare(4, overrides, model, 3)
    sequential = reference((*model[1:], *BATCH), 3)
    assert not np.allclose(sequential[0], reference((*model, *BATCH), 3)[0], rtol=1e-5)


@pytest.mark.parametrize("kernels", covering(["torch", "compiled"], ["compiled"]))
def test_windows_and_capped_scores(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle of three layers has no window, which a stage must know of its own layers."""
    monkeypatch.setattr(build, "COMPILER", "aot_eager")
    layout = ["parallel.tensor=2", "parallel.pipeline=2", *BATCH, f"kernels={kernels}"]
    model = ["model.layers=3", "model.window=4", "model.window_every=2"]
    model += ["model.attention_softcap=0.5", "model.kv_heads=2", "model.positions=rotary"]
    compare(4, layout, model, 2)
    alone = reference((*model, *BATCH), 2)[0]
    for other in ("model.window=5", "model.window_every=1", "model.attention_softcap=null"):
        assert not np.allclose(alone, reference((*model, *BATCH, other), 2)[0], rtol=1e-5)


def test_vocabulary_that_no_tensor_size_divides() -> None:
    """4099 is prime: rows of padding must take no probability and no gradient."""
    for size, overrides in (LAYOUTS["tensor2"], LAYOUTS["tensor2_pipeline2_data2"]):
        compare(size, [*overrides, *BATCH], ["model.vocabulary=4099"])


def test_bf16_stays_near_fp32() -> None:
    """bf16 has 8 bits of mantissa (relative 2^-9 a rounding): 1% on the loss over five steps."""
    exact = reference(tuple(BATCH))[0]
    for size, overrides in ((1, []), LAYOUTS["tensor2_pipeline2_data2"]):
        losses = run_ranks(train_and_collect, size, tiny_values(*overrides, *BATCH), "bf16")[0][0]
        np.testing.assert_allclose(losses, exact, rtol=1e-2)


def test_loss_falls() -> None:
    losses = reference(tuple(BATCH))[0]
    assert torch.tensor(losses).isfinite().all()
    assert losses[-1] < losses[0]


Layouts = Mapping[str, tuple[int, list[str]]]
"""Number of ranks, and overrides, by name."""


def check_layout(
    layouts: Layouts,
    models: Mapping[str, list[str]],
    layout: str,
    model: str,
    steps: int,
    covered: Collection[tuple[str, str]] = (),
) -> None:
    """Compare a model in a layout with one process; layouts of equal size share their ranks.

    Pairs of a layout and a model that are `covered` run apart from the others.
    """
    size, overrides = layouts[layout]
    cases = {
        (name, of): (*models[of], *own)
        for name, (ranks, own) in layouts.items()
        for of in models
        if ranks == size and ((name, of) in covered) == ((layout, model) in covered)
    }
    results = trained(size, tuple(cases.values()), steps)
    alone = [o for o in overrides if not o.startswith("recompute=")]
    check(results[cases[layout, model]], alone, models[model], steps)
