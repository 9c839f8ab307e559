"""What the summary of a run says of its end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontier_llm.telemetry.summary import RunSummary
from frontier_llm.trainer.callbacks.run_report import RunReport


def report_of(rank: int, run_dir: Path) -> RunReport:
    run = SimpleNamespace(dir=str(run_dir))
    context: Any = SimpleNamespace(
        config=SimpleNamespace(run=run), world=SimpleNamespace(rank=rank)
    )
    return RunReport(context)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_zero_alone_writes_the_reason_of_a_failure(tmp_path, rank):
    report_of(rank, tmp_path).on_error(ValueError("no step was possible"))
    summary = RunSummary.read(tmp_path)
    assert (summary is not None) == (rank == 0)
    if summary is not None:
        assert (summary.exit_code, summary.exit_reason) == (1, "no step was possible")


def test_a_failure_after_the_end_does_not_change_the_reason(tmp_path):
    report = report_of(0, tmp_path)
    report.summary = report.summary.model_copy(update={"exit_code": 3, "exit_reason": "stopped"})
    report.on_error(ValueError("late"))
    assert (report.summary.exit_code, report.summary.exit_reason) == (3, "stopped")
