"""The part of the report that holds the plan against the run."""

from collections.abc import Iterator

from frontier_llm.telemetry import page
from frontier_llm.telemetry.page import UNKNOWN
from frontier_llm.telemetry.summary import PlanRow, RunSummary
from frontier_llm.units import format_bytes, format_seconds


def plan_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section on what was planned, where a run has compared it."""
    if not summary.plan:
        return
    words = (
        "On rank 0. Seconds are the shortest of the second and the third step. On a CPU `process` "
        "is all that the operating system counts, the interpreter and its libraries included."
    )
    head = ["", "Planned", "Measured", "Difference"]
    yield page.section("Plan and run", page.table(head, map(_row, summary.plan)), words)


def _row(row: PlanRow) -> list[str]:
    write = format_bytes if row.unit == "bytes" else format_seconds
    if row.predicted is None:
        return [row.name, UNKNOWN, write(row.measured), ""]
    if row.measured == row.predicted:
        difference = "none"
    else:
        difference = f"{row.measured / row.predicted - 1:+.0%}" if row.predicted else ""
    return [row.name, write(row.predicted), write(row.measured), difference]
