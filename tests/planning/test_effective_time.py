"""The simulated effective time agrees with the formulas, and with the bounds of simple cases."""

import math

import pytest

from frontier_lab.planning.effective_time import (
    LONGEST_INTERVAL,
    RATES,
    Recovery,
    curve,
    daly_interval,
    daly_share,
    job_mtbf,
    optima,
    simulate,
    steps_of,
    young_interval,
)

STEP = 15.0
RESTART = Recovery("restart", stall=1.0, seconds=300.0)
IN_PLACE = Recovery("in place", stall=1.0, seconds=30.0, keeps_steps=True)
FALLS_BACK = Recovery(
    "in place", 1.0, 30.0, keeps_steps=True, fallback_share=0.05, fallback_seconds=300.0
)
ERROR = 0.03
"""Largest relative error of the share of time that is not effective; 10,000 failures give 1%."""


def in_place_share(way, mtbf, steps):
    """Return the exact effective share if each failure loses the step in flight."""
    per_step = math.expm1(STEP / mtbf)
    per_stall = math.expm1(way.stall / mtbf)
    seconds = mtbf * math.exp(way.seconds / mtbf) * (steps * per_step + per_stall)
    return steps * STEP / seconds


def test_without_failures_only_stalls_cost_time():
    shares = simulate(RESTART, math.inf, STEP, 10)
    assert shares.effective == 150 / 151
    assert shares.stalled == 1 / 151
    assert job_mtbf(0.0, 1000) == math.inf


@pytest.mark.parametrize("mtbf", [600.0, 2400.0, 22270.0, 178000.0])
@pytest.mark.parametrize("steps", [1, 10, 120])
def test_restarts_agree_with_dalys_model(mtbf, steps):
    exact = daly_share(RESTART, mtbf, steps * STEP)
    found = simulate(RESTART, mtbf, STEP, steps).effective
    assert 1 - found == pytest.approx(1 - exact, rel=ERROR)


@pytest.mark.parametrize("mtbf", [120.0, 2400.0, 22270.0])
@pytest.mark.parametrize("steps", [1, 20])
def test_recovery_in_place_agrees_with_its_closed_form(mtbf, steps):
    found = simulate(IN_PLACE, mtbf, STEP, steps).effective
    assert 1 - found == pytest.approx(1 - in_place_share(IN_PLACE, mtbf, steps), rel=ERROR)


def test_recovery_that_costs_nothing_loses_only_stalls_and_steps_in_flight():
    free = Recovery("free", stall=0.0, seconds=0.0, keeps_steps=True)
    shares = simulate(free, 2400.0, 1e-3, 1000)
    assert shares.recovering == 0
    assert shares.effective == pytest.approx(1, abs=1e-5)
    assert shares.repeated == pytest.approx(0.5e-3 / 2400, rel=0.05)


@pytest.mark.parametrize("way", [RESTART, IN_PLACE, FALLS_BACK])
def test_shares_add_up_to_the_whole_time_and_are_reproducible(way):
    shares = simulate(way, 2400.0, STEP, 5)
    total = shares.effective + shares.stalled + shares.repeated + shares.recovering
    assert total == pytest.approx(1)
    assert shares == simulate(way, 2400.0, STEP, 5)
    assert shares != simulate(way, 2400.0, STEP, 5, seed=1)


def test_more_failures_longer_recoveries_and_more_fallbacks_cost_time():
    def effective(mtbf=2400.0, **changed):
        values = {"stall": 1.0, "seconds": 30.0, "keeps_steps": True, "fallback_seconds": 300.0}
        return simulate(Recovery("way", **{**values, **changed}), mtbf, STEP, 10).effective

    for falling in (
        [effective(mtbf) for mtbf in (1e5, 1e4, 1e3)],
        [effective(seconds=seconds) for seconds in (0.0, 30.0, 300.0)],
        [effective(stall=stall) for stall in (0.0, 1.0, 10.0)],
        [effective(fallback_share=share) for share in (0.0, 0.05, 0.5, 1.0)],
    ):
        assert falling == sorted(falling, reverse=True)
        assert len(set(falling)) == len(falling)


def test_a_fallback_after_every_failure_is_a_restart():
    always = Recovery(
        "in place", 1.0, 30.0, keeps_steps=True, fallback_share=1.0, fallback_seconds=300.0
    )
    found = simulate(always, 2400.0, STEP, 5).effective
    assert 1 - found == pytest.approx(1 - daly_share(RESTART, 2400.0, 5 * STEP), rel=ERROR)


def test_lost_node_local_checkpoints_repeat_the_work_since_the_last_drain():
    lost = Recovery("local", 1.0, 300.0, False, 1.0, 300.0, checkpoints_per_durable=4)
    seldom = simulate(lost, 22270.0, STEP, 10).repeated
    often = simulate(RESTART, 22270.0, STEP, 40).repeated
    assert seldom == pytest.approx(often, rel=0.05)


@pytest.mark.parametrize("nodes", [128, 1024, 2048, 9408])
@pytest.mark.parametrize("way", [RESTART, FALLS_BACK])
def test_the_best_interval_is_near_dalys(way, nodes):
    mtbf = job_mtbf(RATES["llama3"], nodes)
    _, daly = optima(way, mtbf)
    best, shares = max(curve(way, mtbf, STEP), key=lambda point: point[1].effective)
    assert daly / 1.6 <= best * STEP <= daly * 1.6
    at_daly = simulate(way, mtbf, STEP, steps_of(daly, STEP)).effective
    assert shares.effective - at_daly < 0.001


def test_dalys_interval_maximises_his_model():
    for mtbf in (100.0, 1000.0, 1e5):
        at = [
            daly_share(RESTART, mtbf, factor * daly_interval(1.0, mtbf))
            for factor in (0.97, 1.0, 1.03)
        ]
        assert max(at) == at[1]


def test_intervals_in_special_cases():
    assert young_interval(1.0, 20000.0) == 200.0
    assert daly_interval(1.0, 20000.0) == pytest.approx(199.33, abs=0.01)
    assert daly_interval(10.0, 5.0) == 5.0
    assert optima(IN_PLACE, 2400.0) == (LONGEST_INTERVAL, LONGEST_INTERVAL)
    assert optima(FALLS_BACK, 2400.0)[0] == pytest.approx(young_interval(1.0, 48000.0))
    assert daly_share(FALLS_BACK, 2400.0, 100.0) is None
    assert steps_of(0.0, STEP) == 1
