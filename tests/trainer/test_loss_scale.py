"""fp16: overflows are skipped by all ranks together, and the scale finds its level."""

import math
from typing import Any

import pytest
import torch

from frontier_llm.config.precision import PrecisionConfig
from frontier_llm.launch.world import World
from frontier_llm.trainer.progress import LossScale
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.values import tiny_values


def make_scale(name: str = "fp16") -> LossScale:
    config = PrecisionConfig(
        name="fp16", initial_loss_scale=8.0, minimum_loss_scale=1.0, growth_steps=2
    )
    return LossScale(config, name)


def test_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = make_scale()
    scale.update(finite=False)
    assert scale.value == 4.0
    for _ in range(4):
        scale.update(finite=True)
    assert scale.value == 16.0
    for _ in range(10):
        scale.update(finite=False)
    assert scale.value == 1.0
    assert scale.is_at_minimum


def test_good_steps_are_counted_from_the_last_overflow_and_saved() -> None:
    scale = make_scale()
    for finite in (True, False, True):
        scale.update(finite)
    assert scale.value == 4.0
    resumed = make_scale()
    resumed.load_meta(scale.to_meta())
    resumed.update(finite=True)
    assert resumed.value == 8.0


def test_other_precisions_are_not_scaled() -> None:
    scale = make_scale("bf16")
    scale.update(finite=False)
    assert (scale.value, scale.is_at_minimum) == (1.0, True)


def train_with_overflow(world: World, values: dict[str, Any]) -> list[Any]:
    rig = make_rig(world, values, "fp16")
    weights = [record.parameter.clone() for record in rig.model.records]
    first = rig.train(1)[0]
    unchanged = all(
        torch.equal(old, record.parameter)
        for old, record in zip(weights, rig.model.records, strict=True)
    )
    later = rig.train(12, first=1)
    return [first.skipped, unchanged, first.loss_scale, [r.skipped for r in later],
            [r.loss for r in later], [r.grad_norm for r in later]]  # fmt: skip


@pytest.mark.parametrize(
    "layout", covering([[], ["parallel.tensor=2", "parallel.pipeline=2"]], [[]])
)
def test_overflow_is_skipped_by_all_ranks_and_training_goes_on(layout: list[str]) -> None:
    values = tiny_values(
        *layout, "precision=fp16", "precision.initial_loss_scale=1e9", "precision.growth_steps=100"
    )
    ranks = run_ranks(train_with_overflow, 4, values)
    skipped, unchanged, scale, later, losses, norms = ranks[0]
    assert skipped
    assert scale == 1e9
    assert not later[-1]
    assert math.isfinite(norms[-1])
    assert losses[-1] < losses[0]
    for rank in ranks:
        assert rank[1], "a skipped step changed weights"
        assert rank[3] == later, "ranks disagree on what is skipped"
    assert unchanged
