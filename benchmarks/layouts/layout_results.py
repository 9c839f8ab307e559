"""Compute a row of planner_layouts.py from what the ranks measured."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.layouts.layout_case import RANKS
from benchmarks.layouts.layout_rank import RankFigures
from benchmarks.testbed.foreign_load import is_disturbed
from frontier_llm.config import RunConfig
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate

NO_TENSORS = ("reserved", "communicators", "workspace", "slack")
"""Categories of planned memory that no tensor of the program holds."""


@dataclass(frozen=True)
class Row:
    """Planned and measured time and memory of a layout."""

    layout: str
    planned_seconds: float
    seconds: float
    """Median duration of the counted steps on the slower rank."""
    time_error: float
    """Planned divided by measured seconds, minus 1."""
    planned_bytes: int
    """Planned peak memory of tensors on the fullest stage."""
    peak_bytes: int
    """Measured peak memory of tensors on the fuller rank."""
    memory_error: float
    """Planned divided by measured bytes, minus 1."""
    counted_steps: int
    is_disturbed: bool
    """Whether other programs computed during every step, so that all steps count."""
    parts: dict[str, float]
    """Planned seconds by kind of work."""
    phases: dict[str, float]
    """Measured seconds of each phase of a step on rank 0, in one of the steps."""
    by_category: dict[str, int]
    """Planned bytes of tensors by category, on the fullest stage."""
    all_seconds: tuple[float, ...]
    """Durations of all timed steps on the slower rank."""


def make_row(layout: str, config: RunConfig, turns: Sequence[Sequence[RankFigures]]) -> Row:
    """Return the row of a layout.

    Args:
        layout: name of the layout.
        config: its configuration on the calibrated cluster.
        turns: for each round and each rank, what was measured.
    """
    planned = estimate(Candidate.of(config, RANKS, RANKS))
    every, counted = [], []
    for ranks in turns:
        for steps in zip(*(rank.steps for rank in ranks), strict=True):
            seconds, own = max(step.seconds for step in steps), sum(step.own for step in steps)
            every.append(seconds)
            if not is_disturbed(steps[0].busy, own, steps[0].seconds):
                counted.append(seconds)
    measured = statistics.median(counted or every)
    by_category = _tensors(planned)
    planned_bytes = sum(by_category.values())
    peak_bytes = max(rank.peak_bytes for ranks in turns for rank in ranks)
    return Row(
        layout=layout,
        planned_seconds=planned.time.seconds,
        seconds=measured,
        time_error=planned.time.seconds / measured - 1,
        planned_bytes=planned_bytes,
        peak_bytes=peak_bytes,
        memory_error=planned_bytes / peak_bytes - 1,
        counted_steps=len(counted or every),
        is_disturbed=not counted,
        parts=planned.time.parts,
        phases=turns[0][0].phases,
        by_category=by_category,
        all_seconds=tuple(every),
    )


def _tensors(planned: Estimate) -> dict[str, int]:
    """Return the planned bytes of tensors by category, on the fullest stage."""
    stages = [
        {name: size for name, size in stage.by_category.items() if name not in NO_TENSORS}
        for stage in planned.memory
    ]
    return max(stages, key=lambda stage: sum(stage.values()))
