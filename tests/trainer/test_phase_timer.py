"""The timer of the first steps."""

import torch

from frontier_llm.trainer import step_measurements
from frontier_llm.trainer.step_measurements import MEASURED_STEPS, PassTimes, PhaseTimer


def test_the_first_step_warms_up_and_the_shortest_of_the_others_counts(monkeypatch):
    now = 100.0
    monkeypatch.setattr(step_measurements.time, "perf_counter", lambda: now)
    timer = PhaseTimer(torch.device("cpu"), PassTimes(1))
    for passes, update in ((1.0, 0.25), (8.0, 2.0), (4.0, 3.0), (0.5, 0.5)):
        timer.begin()
        now += passes
        timer.mark("passes")
        now += update
        timer.mark("update")
        assert timer.is_complete == (passes == 0.5)
        timer.end()
    assert len(timer.laps) == MEASURED_STEPS
    assert timer.laps[0] == {"passes": 1.0, "update": 0.25}
    assert timer.typical() == {"passes": 4.0, "update": 2.0}
