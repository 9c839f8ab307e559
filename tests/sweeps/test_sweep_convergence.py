"""The best value so far of one or several searches."""

from dataclasses import replace

from frontier_lab.sweeps.sweep_report import best_so_far, convergence_table, spread
from frontier_lab.sweeps.sweep_trials import WORST_LOSS, Trial, read_in_order

FAILED = Trial(["a=1"], "failed", "", 1.0, 0.0, None, None, None)


def _done(speed, **fields):
    return replace(FAILED, status="done", tokens_per_second=speed, **fields)


def test_the_best_never_gets_worse_and_a_failure_counts_as_zero():
    trials = [FAILED, _done(3.0), _done(1.0), FAILED, _done(5.0)]
    assert best_so_far(trials) == [0.0, 3.0, 3.0, 3.0, 5.0]


def test_speeds_per_device_and_losses_are_compared_as_the_search_does():
    per_device = [
        _done(8.0, ranks=4, goal="speed_per_device"),
        _done(9.0, ranks=9, goal="speed_per_device"),
    ]
    assert best_so_far(per_device) == [2.0, 2.0]
    losses = [replace(FAILED, goal="loss"), *(_done(1.0, validation_loss=x, goal="loss")
              for x in (3.0, 4.0, 2.0))]  # fmt: skip
    assert best_so_far(losses) == [WORST_LOSS, 3.0, 3.0, 2.0]


def test_several_searches_have_a_median_and_a_range():
    assert spread([[1, 5], [2, 2], [3, 9, 9]]) == ([1, 2], [2, 5], [3, 9])
    lines = convergence_table({"own": [[1.0] * 12], "random": [[2.0] * 12, [4.0] * 12, [3.5] * 9]})
    assert lines[0] == "| trials | own | random |"
    assert lines[2:] == ["| 10 | 1 | 3 (2 to 4) |", "| 12 | 1 | 3 (2 to 4) |"]


def test_trials_are_read_in_the_order_in_which_they_ran(tmp_path):
    for number, speed in ((10, 7.0), (9, 5.0), (0, 6.0)):
        (tmp_path / str(number)).mkdir()
        _done(speed).write(tmp_path / str(number))
    assert [trial.speed for trial in read_in_order(tmp_path)] == [6.0, 5.0, 7.0]
