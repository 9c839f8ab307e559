"""Separate documents have the losses and gradients that they have alone, in every layout."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.data.document_rows import Row, document_batch
from frontier_llm.launch.world import World
from frontier_llm.model import build
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig, mean_losses
from tests.trainer.test_parity import BATCH, assemble, compare, first_gradients, reference
from tests.values import tiny_values

LENGTHS = [5, 1, 7, 3]
MODELS = {
    "learned": ["data.documents=separate"],
    "rotary_window_capped": [
        "data.documents=separate",
        "model.positions=rotary",
        "model.window=4",
        "model.window_every=2",
        "model.attention_softcap=0.5",
        "model.kv_heads=2",
        "model.residual=parallel",
    ],
}
LAYOUTS = {
    "alone": (1, []),
    "tensor2": (2, ["parallel.tensor=2"]),
    "pipeline2": (2, ["parallel.pipeline=2"]),
    "tensor2_sequence_pipeline2": (
        4,
        ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"],
    ),
}


def losses_together_and_alone(world: World, values: dict[str, Any]) -> tuple[float, list[float]]:
    """The mean loss of documents in one sample, and of each as a sample of its own."""
    rig = make_rig(world, values)
    return loss(rig, LENGTHS), [loss(rig, [n], part) for n, part in documents()]


def documents() -> list[tuple[int, slice]]:
    borders = np.cumsum([0, *LENGTHS]).tolist()
    return [(b - a, slice(a, b + 1)) for a, b in pairwise(borders) if b - a > 1]


def batch_of(rig: Rig, lengths: list[int], part: slice, multiple: int = 1) -> Any:
    """Build a batch of one sample, padded to a multiple of some tokens."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(rig.config.model.vocabulary, (sum(LENGTHS) + 1,), generator=draw)
    tokens = np.pad(text.numpy()[part], (0, -sum(lengths) % multiple))
    row = Row(tokens, np.array(lengths), continues=False)
    return document_batch([row], [0], separate=True)


def loss(rig: Rig, lengths: list[int], part: slice = slice(None)) -> float:
    with torch.no_grad():
        found = mean_losses(rig.step._pipeline, [batch_of(rig, lengths, part, multiple=2)])
    return found[0].item() if found else float("nan")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_document_has_the_loss_that_it_has_alone(layout: str, model: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    values = tiny_values(*MODELS[model], *overrides)
    together, alone = run_ranks(losses_together_and_alone, ranks, values)[-1]
    predicted = [n - 1 for n, _ in documents()]
    assert together == pytest.approx(np.average(alone, weights=predicted), rel=1e-5)
    assert len(set(alone)) == len(alone)


def gradients_together_and_alone(world: World, values: dict[str, Any]) -> dict[str, float]:
    """Return the relative error of each gradient."""
    rig = make_rig(world, values)

    def gradients(number: int, lengths: list[int], part: slice) -> dict[str, np.ndarray]:
        rig.step.run(number, [batch_of(rig, lengths, part)], 0.0)
        return assemble([first_gradients(rig)])

    together = gradients(1, LENGTHS, slice(None))
    alone = [(n - 1, gradients(2, [n], part)) for n, part in documents()]
    errors = {}
    for name, gradient in together.items():
        expected = sum(n * single[name] for n, single in alone) / sum(n for n, _ in alone)
        errors[name] = float(np.linalg.norm(gradient - expected) / np.linalg.norm(expected))
    return errors


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_the_sums_of_those_alone(model: str) -> None:
    errors = run_ranks(
        gradients_together_and_alone, 1, tiny_values(*MODELS[model], "data.global_batch=1")
    )[0]
    assert max(errors.values()) < 1e-5, errors


PARITY = {
    "tensor2_sequence_selective": (
        2,
        ["parallel.tensor=2", "parallel.sequence=true", "recompute=selective"],
    ),
    "pipeline2_chunks2_full": (
        2,
        ["parallel.pipeline=2", "parallel.chunks=2", "recompute=full"],
    ),
    "compiled": (2, ["sharding=zero3", "kernels=compiled"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(PARITY, ["compiled"]))
def test_a_layout_equals_one_process(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILER", "aot_eager")
    ranks, layout = PARITY[case]
    compare(ranks, [*layout, *BATCH], MODELS["rotary_window_capped"], 2)


@pytest.mark.slow
def test_joined_documents_have_other_losses() -> None:
    separate = reference((*MODELS["learned"], *BATCH), 2)[0]
    assert not np.allclose(separate, reference(tuple(BATCH), 2)[0], rtol=1e-4)
