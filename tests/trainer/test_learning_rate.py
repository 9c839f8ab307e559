"""The learning rate over a run."""

import pytest

from frontier_llm.trainer.learning_rate import LearningRate


def test_warms_up_linearly_then_falls_as_a_cosine() -> None:
    rate = LearningRate(peak=1.0, minimum=0.1, warmup_steps=10, decay_steps=110)
    assert [rate(1), rate(5), rate(10)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate(60) == pytest.approx(0.55)  # half way down
    assert rate(110) == rate(500) == 0.1
    values = [rate(step) for step in range(10, 111)]
    assert values == sorted(values, reverse=True)


def test_without_warm_up_and_with_one_longer_than_the_run() -> None:
    assert LearningRate(1.0, 0.0, 0, 100)(1) == pytest.approx(1.0, abs=1e-3)
    assert LearningRate(1.0, 0.0, 50, 20)(25) == pytest.approx(0.5)
