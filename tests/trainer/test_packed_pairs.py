"""Packed texts of an encoder-decoder have the losses and gradients that they have alone."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.config import decode
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.data.denoising import Denoising
from frontier_llm.data.document_rows import Row
from frontier_llm.data.pair_packing import Pairs
from frontier_llm.launch.world import World
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_parity import assemble, check_layout, first_gradients
from tests.values import SIDES, T5GEMMA, T5GEMMA2, TINY_T5, tiny_values

TEXTS, DENOISERS = [9, 4, 12], (1, 2, 0)
PACKED = (
    "data.documents=separate", "data.packing=best_fit", "data.decoder_length=24",
    "data.sequence_length=40", "data.global_batch=1", "data.loss_mean=tokens",
    "data.denoisers=[{rate: 0.3, span: 2}, {rate: 0.4, span: 3}, {rate: 0.5, span: null}]",
)  # fmt: skip
SIZES = ("model.layers=4", "model.encoder_layers=2", "model.vocabulary=256")
MODELS = {"mt5": TINY_T5, "t5gemma": T5GEMMA, "sides": SIDES, "t5gemma2": T5GEMMA2}
LAYOUTS = {
    "tensor2_sequence_selective": (
        2, ["parallel.tensor=2", "parallel.sequence=true", "recompute=selective"],
    ),
    "pipeline2_in_encoder_full": (
        2, ["parallel.pipeline=2", "parallel.layers_per_stage=[1,3]", "recompute=full"],
    ),
    "pipeline2_at_border": (2, ["parallel.pipeline=2", "parallel.layers_per_stage=[2,2]"]),
    "pipeline2_in_decoder": (2, ["parallel.pipeline=2", "parallel.layers_per_stage=[3,1]"]),
    "tensor2_pipeline2_interleaved_zero3": (
        8, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2",
            "parallel.schedule=interleaved", "sharding=zero3"],
    ),
    "pipeline2_folded_mixed": (
        8, ["parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=zb_v",
            "sharding.params=1", "sharding.grads=2", "sharding.optimizer=4"],
    ),
}  # fmt: skip


def batch(config: RunConfig, texts: list[int]) -> Batch:
    """Pack some of the texts into one sample; both sides end with padding."""
    pairs = Pairs.of(config.data)
    assert pairs is not None
    drawn = [np.random.default_rng(k).integers(2, 120, n) for k, n in enumerate(TEXTS)]
    denoising = _SameSpans(
        pairs.denoisers, pairs.text, pairs.inputs, range(250, 150, -1), {}, 1, 7, pairs.targets
    )
    row = Row(
        np.concatenate([drawn[k] for k in texts]),
        np.array([TEXTS[k] for k in texts]),
        continues=False,
        denoisers=tuple(DENOISERS[k] for k in texts),
    )
    made = denoising.batch([row], [0], start=config.model.start_token)
    assert made.loss_mask[0, -1] == 0
    assert made.encoder_cumulative_lengths is not None
    return made


class _SameSpans(Denoising):
    """Removes the same spans of a text in every sample and place."""

    def _divided(self, text: Any, number: int, key: int) -> Any:
        return super()._divided(text, number, len(text))


def gradients(rig: Rig, texts: list[int]) -> tuple[float, float, dict[str, np.ndarray]]:
    """The sum of the losses of the predicted tokens, their number, and mean gradients."""
    made = batch(rig.config, texts)
    if len(texts) == 1:  # as a sample that is not packed
        assert made.encoder_cumulative_lengths is not None
        mask = torch.arange(40) < made.encoder_cumulative_lengths[0, 1]
        made = replace(
            made,
            encoder_mask=mask[None],
            encoder_cumulative_lengths=None,
            cumulative_lengths=None,
        )
    result = rig.step.run(1, [made], 0.0)
    count = float(made.loss_mask.sum())
    return result.loss * count, count, assemble([first_gradients(rig)])


def together_and_alone(world: World, values: dict[str, Any]) -> tuple[Any, list[Any]]:
    rig = make_rig(world, values)
    return gradients(rig, [0, 1, 2]), [gradients(rig, [k]) for k in range(3)]


@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_the_sums_of_those_alone(model: str) -> None:
    values = tiny_values(*MODELS[model], *SIZES, *PACKED)
    assert batch(decode(values), [0, 1, 2]).encoder_tokens[0, -19:].sum() == 0, "padding"
    ((loss, count, packed), alone) = run_ranks(together_and_alone, 1, values)[0]
    assert sum(n for _, n, _ in alone) == count
    assert sum(single for single, _, _ in alone) == pytest.approx(loss, rel=1e-6)
    for name, gradient in packed.items():
        expected = sum(n * of[name] for _, n, of in alone) / count
        error = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
        assert error < 1e-5, name


@pytest.mark.parametrize("model", MODELS)
def test_a_full_encoder_beside_a_padded_decoder_has_the_same_loss(model: str) -> None:
    """The queries of the padding have keys, too; a softmax over none would be NaN."""
    values = [
        tiny_values(*MODELS[model], *SIZES, *PACKED, f"data.sequence_length={inputs}")
        for inputs in (40, 21)
    ]
    assert (batch(decode(values[1]), [0, 1, 2]).encoder_tokens > 0).all(), "no padding"
    (padded, *_), (full, *_) = (run_ranks(packed_alone, 1, each)[0] for each in values)
    assert full == pytest.approx(padded, rel=1e-6)


def packed_alone(world: World, values: dict[str, Any]) -> Any:
    return gradients(make_rig(world, values), [0, 1, 2])


IN_LAYOUTS = ("mt5", "sides", "t5gemma2")
CASES = list(product(LAYOUTS, IN_LAYOUTS))
COVERED = [case for place, case in enumerate(CASES) if place % 2]
"""Every layout always has one or two of the models, and every model some of the layouts."""


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(CASES, COVERED), ids="-".join)
def test_packed_texts_in_a_layout_equal_one_process(case: tuple[str, str]) -> None:
    packed = [*PACKED[:2], "data.sequence_length=16", "data.decoder_length=8"]
    models = {
        name: [*MODELS[name], *SIZES, *packed, "data.global_batch=4", "optimizer.epsilon=1e-3"]
        for name in IN_LAYOUTS
    }
    check_layout(LAYOUTS, models, *case, 2, COVERED)
