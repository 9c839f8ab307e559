"""Where training continues after a death, decided from what the ranks have in memory."""

from dataclasses import replace
from typing import Any

import pytest

from frontier_llm.recovery.agreement import Decision, Report, decide
from frontier_llm.trainer.step_result import StepSums

PLACES = ["a", "b", "a", "b"]
"""Ranks 0 and 2 hold the same states, and so do ranks 1 and 3."""
NEW = Report(has_states=False)


def sums(step: int) -> StepSums:
    return StepSums(step, 1.0, False, (float(step), 2.0))


def having(step: int, ended: int | None = None, counted: int | None = None) -> Report:
    """A rank that has updated with a step."""
    counters: dict[str, Any] = {"progress": {"step": step if counted is None else counted}}
    return Report(True, sums(step), step if ended is None else ended, counters, "fp32")


def test_a_new_rank_gets_the_states_of_its_replica() -> None:
    decision = decide([having(5), NEW, having(5), having(5)], PLACES)
    assert decision.source == "memory"
    assert decision.lenders == {1: 3}
    assert (decision.sums, decision.ended) == (sums(5), 5)


def test_ranks_behind_repeat_the_update_of_those_ahead() -> None:
    reports = [having(4), NEW, having(5, ended=4, counted=4), having(4)]
    decision = decide(reports, PLACES)
    assert decision.sums == sums(5)
    assert decision.ended == 4
    assert decision.counters == {"progress": {"step": 4}}


def test_a_rank_without_any_step_catches_up_with_the_first() -> None:
    first = Report(True, None, 0, {"progress": {"step": 0}})
    decision = decide([first, having(1, ended=0), first, NEW], PLACES)
    assert decision.sums == sums(1)
    assert decision.ended == 0


def test_a_new_rank_0_ends_a_step_that_has_no_record() -> None:
    recorded = replace(NEW, ended=6)
    decision = decide([recorded, having(7), having(7), having(7)], PLACES)
    assert decision.source == "memory"
    assert decision.ended == 6
    # it never goes back further, whatever the file says
    assert decide([NEW, having(7), having(7), having(7)], PLACES).ended == 6


def test_a_step_that_is_ended_again_is_not_counted_twice() -> None:
    """Rank 0 died before it recorded step 7; the others have counted it as a bad step."""
    judged = {"progress": {"step": 7, "bad_steps": 3}}
    others = replace(having(7), counters=judged, unjudged={"step": 7, "bad_steps": 2})
    decision = decide([replace(NEW, ended=6), others, others, others], PLACES)
    assert decision.counters == {"progress": {"step": 7, "bad_steps": 2}}
    assert decide([others] * 4, PLACES).counters == judged


@pytest.mark.parametrize(
    ("reports", "obstacle", "reason"),
    [
        ([NEW, having(5), NEW, having(5)], "", "no other rank has the states of rank 0"),
        ([NEW] * 4, "", "no step has been done"),
        ([Report(True, None, 0, {"progress": {"step": 0}})] * 4, "", "no step has been done"),
        ([having(5), NEW, having(5), having(5)], "muon communicates", "muon communicates"),
        # a rewind from step 9 to step 4 had begun on rank 1
        (
            [having(9), Report(True, None, 9, {"progress": {"step": 4}}), having(9), NEW],
            "",
            "loading a checkpoint",
        ),
        (
            [having(9), Report(True, None, 9, {"progress": {"step": 9}}), having(9), NEW],
            "",
            "loading a checkpoint",
        ),
    ],
)
def test_otherwise_all_ranks_load_a_checkpoint(
    reports: list[Report], obstacle: str, reason: str
) -> None:
    decision = decide(reports, PLACES, obstacle)
    assert decision.source == "checkpoint"
    assert reason in decision.reason


def test_reports_and_decisions_pass_through_the_store_unchanged() -> None:
    numbers = (0.1, float("inf"), 1e-320, -0.0)
    report = replace(having(5), sums=replace(sums(5), numbers=numbers))
    assert Report.from_json(report.to_json()) == report
    decision = decide([having(5), NEW, having(5), having(5)], PLACES)
    assert Decision.from_json(decision.to_json()) == decision
    assert Report.from_json(NEW.to_json()) == NEW
