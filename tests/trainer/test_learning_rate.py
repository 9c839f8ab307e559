"""The learning rate over a run."""

import math

import pytest

from frontier_llm.config import decode
from frontier_llm.config.rules import check
from frontier_llm.trainer.learning_rate import LearningRate
from tests.values import tiny_values

RATES = ("optimizer.learning_rate=1.0", "optimizer.minimum_learning_rate=0.1", "trainer.steps=110")
SCHEDULES = {
    "cosine": (),
    "linear": (),
    "constant": (),
    "wsd": (),
    "inverse_sqrt": ("optimizer.timescale_steps=20",),
}


def of(schedule: str, *overrides: str, warmup: int = 10) -> LearningRate:
    """Return the schedule that a configuration gives, after the rules have accepted it."""
    chosen = (f"optimizer.schedule={schedule}", f"optimizer.warmup_steps={warmup}", *overrides)
    config = decode(tiny_values(*RATES, *chosen))
    check(config, 1)
    return LearningRate.of(config)


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_and_never_rises_again(schedule: str) -> None:
    rate = of(schedule, *SCHEDULES[schedule])
    assert [rate(step) for step in range(1, 11)] == pytest.approx([n / 10 for n in range(1, 11)])
    values = [rate(step) for step in range(10, 500)]
    assert values == sorted(values, reverse=True)
    assert max(values) == 1.0
    assert min(values) >= 0.1


def test_linear_is_a_line() -> None:
    rate = of("linear")
    assert [rate(35), rate(60), rate(85)] == pytest.approx([0.775, 0.55, 0.325])
    assert rate(110) == rate(500) == 0.1


def test_constant_stays_at_its_peak() -> None:
    assert {of("constant")(step) for step in range(10, 1000)} == {1.0}


def test_wsd_is_stable_then_falls() -> None:
    rate = of("wsd", "optimizer.cooldown_steps=40", "optimizer.cooldown_shape=linear")
    assert {rate(step) for step in range(10, 71)} == {1.0}
    assert [rate(80), rate(90), rate(110)] == pytest.approx([0.775, 0.55, 0.1])
    rate = of("wsd", "optimizer.cooldown_steps=40", "optimizer.cooldown_shape=1-sqrt")
    assert {rate(step) for step in range(10, 71)} == {1.0}
    assert rate(80) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(0.25)))
    assert [rate(110), rate(500)] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ((), 88),
        (("optimizer.cooldown_share=0.5",), 55),
        (("optimizer.cooldown_share=0.5", "optimizer.decay_steps=80"), 40),
        (("optimizer.cooldown_steps=5",), 105),
    ],
)
def test_the_length_of_a_cooldown(overrides: tuple[str, ...], start: int) -> None:
    """By default a fifth of the run, with the form 1-sqrt."""
    rate = of("wsd", *overrides)
    assert rate(start) == 1.0 > rate(start + 1)
    fraction = 1 / rate.cooldown_steps
    assert rate(start + 1) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(fraction)))


def test_wsd_can_be_extended_from_its_stable_phase() -> None:
    """Before the cooldown of the shorter run, both runs have the same rates."""
    short, long = of("wsd"), of("wsd", "optimizer.decay_steps=1000")
    assert all(short(step) == long(step) for step in range(1, short.decay_start + 1))


def test_inverse_square_root_is_that_of_the_transformer_and_of_t5() -> None:
    hidden, warmup = 512, 4000
    peak = hidden**-0.5 * warmup**-0.5
    rate = LearningRate(peak, 0.0, warmup, 1, "inverse_sqrt", timescale_steps=warmup)
    for step in (1, 100, 4000, 4001, 100_000):
        published = hidden**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert rate(step) == pytest.approx(published)
    rate = LearningRate(0.01, 0.0, 0, 1, "inverse_sqrt", timescale_steps=10_000)
    for step in (1, 10_000, 10_001, 1_000_000):
        assert rate(step) == pytest.approx(1 / math.sqrt(max(step, 10_000)))


def test_inverse_square_root_falls_from_the_warm_up_down_to_the_minimum() -> None:
    rate = of("inverse_sqrt")
    assert [rate(10), rate(40), rate(160)] == pytest.approx([1.0, 0.5, 0.25])
    assert rate(2000) == 0.1


def test_a_description_has_the_rates_where_the_form_changes() -> None:
    assert of("wsd").describe(110) == (
        "wsd: 0.1 at step 1, 1 at step 10, 1 at step 88, 0.1 at step 110"
    )
    assert of("constant").describe(50) == "constant: 0.1 at step 1, 1 at step 10, 1 at step 50"
