"""The chart of the learning-rate schedules shows every schedule."""

from typing import get_args

from docs.generate import rates_chart
from frontier_llm.config.optimizer import Schedule


def test_the_chart_is_current(capsys):
    assert rates_chart.main([]) == 0, capsys.readouterr().err


def test_a_chart_of_other_rates_is_stale(tmp_path, monkeypatch, capsys):
    other = tmp_path / "learning_rate.py"
    other.write_text("PEAK = 2\n")
    monkeypatch.setattr(rates_chart.learning_rate, "__file__", str(other))
    assert rates_chart.main([]) == 1
    assert "--write" in capsys.readouterr().err


def test_every_schedule_is_drawn():
    assert {rate.schedule for rate, _ in rates_chart.SCHEDULES.values()} == set(get_args(Schedule))
