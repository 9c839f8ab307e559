"""How well the planner chooses among the measured layouts of a job."""

import math
from types import SimpleNamespace

import pytest

from benchmarks.planner_accuracy import choices, table_choices
from docs.generate.blocks import ROOT
from docs.generate.planner_page import choices_table
from frontier_lab.planning.measured import MeasuredRun, Prediction
from tests.planner.layouts import make

VTRAIN = "vtrain_single_node"


def _run(predicted, measured, quantity="measured_step_seconds", batch=16, micro_batch=1):
    """Return the prediction for a run of a job that its global batch tells apart."""
    candidate = make(f"data.global_batch={batch}", f"data.micro_batch={micro_batch}")
    is_rate = quantity != "measured_step_seconds"
    value = 100 / measured if is_rate else measured
    run = MeasuredRun(1, "", quantity, value, 0.0, (candidate,))
    estimate = SimpleNamespace(candidate=candidate, time=SimpleNamespace(seconds=predicted))
    return Prediction(run, 100 / predicted if is_rate else predicted, estimate)


def _job(predicted, measured, **values):
    return [_run(*seconds, **values) for seconds in zip(predicted, measured, strict=True)]


@pytest.mark.parametrize("quantity", ["measured_step_seconds", "measured_tflops"])
def test_regret_is_relative_to_the_fastest_layout_of_each_job(quantity):
    wrong = _job([2.0, 3.0, 4.0], [1.5, 1.0, 9.0], quantity=quantity)
    right = _job([5.0, 6.0], [7.0, 8.0], quantity=quantity, batch=32)
    alone = _job([1.0], [9.0], quantity=quantity, batch=8)
    found = choices([*wrong, *right, *alone])
    assert (found.jobs, found.fastest) == (2, 1)
    assert found.regret == pytest.approx(0.25)
    assert found.largest_regret == pytest.approx(0.5)
    assert (found.ranked, found.rank_correlation) == (0, None)


def test_ranks_are_compared_and_equal_values_share_theirs():
    found = choices(_job([1.0, 2.0, 3.0, 9.0], [5.0, 7.0, 6.0, 80.0]))
    assert found.rank_correlation == pytest.approx(1 - 6 * 2 / (4 * 15))  # Spearman's formula
    tied = choices(_job([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]))
    assert tied.rank_correlation == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_a_table_without_a_choice_has_none():
    assert choices(_job([1.0], [2.0])) is None


def test_errors_that_all_runs_of_a_shape_share_can_be_removed():
    small = _job([2.0, 4.0], [1.0, 2.0], micro_batch=1)
    large = _job([1.5, 4.5], [1.5, 4.5], micro_batch=2)
    assert choices([*small, *large]).regret == pytest.approx(0.5)
    assert choices([*small, *large], corrects_shapes=True).regret == 0


@pytest.mark.exhaustive
def test_the_choices_are_as_good_as_the_page_says():
    """The regret of vTrain's table misses the target of 1%; without errors of shapes it is met."""
    found = table_choices(VTRAIN)
    for kind in ("left out", "in sample"):
        assert found[kind].jobs == 144
        assert found[kind].rank_correlation >= 0.9
        assert found[kind].regret <= 0.06
    corrected = found["left out, shapes corrected"]
    assert corrected.regret <= 0.01
    assert corrected.rank_correlation >= 0.98


@pytest.mark.exhaustive
def test_the_table_of_the_page_is_current():
    assert (
        "".join(f"{line}\n" for line in choices_table())
        in (ROOT / "docs" / "planner.md").read_text()
    )
