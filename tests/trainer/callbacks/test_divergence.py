"""Which losses count as a spike."""

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from frontier_llm.config.run import RunConfig
from frontier_llm.trainer.callbacks.run_checks import Divergence
from frontier_llm.trainer.progress import LossScale, Progress
from frontier_llm.trainer.step_result import StepResult
from tests.values import tiny_values


@pytest.fixture
def divergence() -> Divergence:
    values = tiny_values("trainer.spike_factor=2", "trainer.spike_window=3")
    config = RunConfig.model_validate(values)
    step = SimpleNamespace(loss_scale=LossScale(config.precision, "fp32"))
    context = SimpleNamespace(config=config, train_step=step, progress=Progress())
    return Divergence(cast(Any, context))


def step(loss: float, skipped: bool = False) -> StepResult:
    return StepResult(
        loss=loss, grad_norm=1.0, samples=1, skipped=skipped, loss_scale=1.0, digest=0,
        stop=False, sent={}, unquantised={},
    )  # fmt: skip


def test_a_loss_far_above_a_full_window_is_a_spike(
    divergence: Divergence,
) -> None:
    assert not any(divergence.is_spike(step(loss)) for loss in (9.0, 1.0, 1.0))
    assert not divergence.is_spike(step(2.0))
    assert divergence.is_spike(step(2.1))
    assert divergence.is_spike(step(2.1)), "a spike is not counted for the median"


def test_a_resumed_run_knows_the_losses_before(divergence: Divergence) -> None:
    for _ in range(3):
        divergence.is_spike(step(1.0))
    resumed = Progress()
    resumed.load_meta(json.loads(json.dumps(divergence.context.progress.to_meta())))
    context = SimpleNamespace(**{**vars(divergence.context), "progress": resumed})
    assert Divergence(cast(Any, context)).is_spike(step(2.1))


def test_a_skipped_step_changed_nothing_and_is_no_spike(divergence: Divergence) -> None:
    for _ in range(3):
        divergence.is_spike(step(1.0))
    for loss in (math.inf, math.nan, 1e9):
        assert not divergence.is_spike(step(loss, skipped=True))
    assert divergence.is_spike(step(2.1)), "a skipped step does not count for the median"
