"""Rows, targets and tables of checkpoint_in_training.py."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.own_loop.library_results import spread
from benchmarks.saved_training.save_limits import Limit
from benchmarks.saved_training.save_phases import Phase, Schedule
from benchmarks.saved_training.training_runs import RunFigures
from benchmarks.saved_training.training_savers import ASYNCHRONOUS, BASELINE, OURS
from frontier_llm.errors import TrainingError

MILLI = 1e-3
LARGEST_DIFFERENCE = 1e-6
"""Largest relative difference between the losses of two savers in the same step."""
END_TO_END_TARGET, PEER_TARGET, BLOCKED_TARGET = 2.2, 1.3, 1 / 48
"""Targets of our saver with a save after every step: the time of torch.save with fsync and of the
best asynchronous peer over its time; its blocked time over that of torch.save."""
Runs = Mapping[str, Sequence[RunFigures]]
"""The runs of each saver with the same number of ranks, by round."""


@dataclass(frozen=True)
class Comparison:
    """All savers with one number of ranks and one interval between saves."""

    ranks: int
    every: int
    megabytes: float
    """Size of a checkpoint of all ranks in millions of bytes."""
    rows: list[dict[str, Any]]
    """Row of each saver; times in ms, as medians with minima and maxima over rounds."""
    targets: list[dict[str, Any]]
    """Name, target, measured ratio, predicted ratio, and whether it is met."""


def compare(
    ranks: int, runs: Runs, schedule: Schedule, limits: Mapping[tuple[str, int], Limit]
) -> list[Comparison]:
    """Return one comparison per phase with saves.

    Args:
        ranks: number of ranks.
        runs: measurements, all with this number of ranks.
        schedule: the phases of the runs; the first one has no saves.
        limits: predictions by saver and interval.
    """
    size = next(iter(runs.values()))[0].states_bytes / 1e6
    plain = statistics.median(_plain_seconds(runs, schedule))
    found = []
    for index, phase in enumerate(schedule.phases):
        if not phase.every:
            continue
        rows = [
            _row(saver, of_saver, phase, index, plain, limits[saver, phase.every])
            for saver, of_saver in runs.items()
        ]
        targets = _targets(rows) if phase.every == 1 else []
        found.append(Comparison(ranks, phase.every, size, rows, targets))
    return found


def check_losses(runs: Runs) -> float:
    """Return the largest relative difference between the losses of two runs.

    Raises:
        TrainingError: it is too large, so a saver has changed the training.
    """
    reference, *others = [run.losses for of_saver in runs.values() for run in of_saver]
    pairs = [pair for losses in others for pair in zip(reference, losses, strict=True)]
    difference = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    if not difference <= LARGEST_DIFFERENCE:
        raise TrainingError(f"the losses of two savers differ by {difference:.1e} of the loss")
    return difference


def plain_steps(runs: Runs, schedule: Schedule) -> dict[str, Any]:
    """Return the time of a step without saves in ms, as median, minimum and maximum over runs."""
    return _milliseconds(_plain_seconds(runs, schedule))


def make_table(comparison: Comparison) -> Table:
    """Return the table of all savers with one number of ranks and one interval."""
    steps = "every step" if comparison.every == 1 else f"every {comparison.every} steps"
    title = f"{comparison.ranks} ranks, {comparison.megabytes:.0f} MB saved {steps}"
    table = Table(title=title, title_justify="left", box=HORIZONTALS, pad_edge=False)
    table.add_column("saver", no_wrap=True)
    for heading in ("step\nms", "blocked\nms per save", "end to end\nms per step", "slowdown",
                    "bound\nms per step"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound by")
    for row in comparison.rows:
        table.add_row(
            row["saver"], *(_cell(row[key], 1) for key in ("step_ms", "blocked_ms",
            "end_to_end_ms")), _cell(row["slowdown"], 2), f"{row['bound_ms']:.1f}", row["bound_by"],
        )  # fmt: skip
    table.caption = "\n".join(_target_line(target) for target in comparison.targets)
    table.caption_justify = "left"
    return table


def _plain_seconds(runs: Runs, schedule: Schedule) -> list[float]:
    """Return the time of a step without saves, for each run."""
    steps = schedule.phases[0].steps
    return [run.steps_seconds(0) / steps for of_saver in runs.values() for run in of_saver]


def _row(
    saver: str,
    runs: Sequence[RunFigures],
    phase: Phase,
    index: int,
    plain_seconds: float,
    limit: Limit,
) -> dict[str, Any]:
    totals = [run.total_seconds(index) / phase.steps for run in runs]
    return {
        "saver": saver,
        "step_ms": _milliseconds([run.steps_seconds(index) / phase.steps for run in runs]),
        "blocked_ms": _milliseconds([run.blocked_seconds(index) for run in runs]),
        "end_to_end_ms": _milliseconds(totals),
        "slowdown": spread([total / plain_seconds for total in totals]),
        "bound_ms": limit.step_seconds / MILLI,
        "bound_by": limit.cause,
    }


def _targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare our saver with its targets; a peer that was not measured has no target."""
    by_saver = {row["saver"]: row for row in rows}
    if OURS not in by_saver:
        return []
    ours, found = by_saver[OURS], []
    peers = [row for row in rows if row["saver"] in ASYNCHRONOUS]
    if BASELINE in by_saver:
        base = by_saver[BASELINE]
        name = f"end to end, {BASELINE} over {OURS}"
        found.append(_target(name, END_TO_END_TARGET, base, ours, "end_to_end_ms"))
    if peers:
        best = min(peers, key=lambda row: float(row["end_to_end_ms"]["median"]))
        name = f"end to end, {best['saver']} over {OURS}"
        found.append(_target(name, PEER_TARGET, best, ours, "end_to_end_ms"))
    if BASELINE in by_saver:
        name = f"blocked, {BASELINE} over {OURS}"
        found.append(_target(name, 1 / BLOCKED_TARGET, base, ours, "blocked_ms"))
    return found


def _target(
    name: str, target: float, other: Mapping[str, Any], ours: Mapping[str, Any], key: str
) -> dict[str, Any]:
    pairs = zip(other[key]["all"], ours[key]["all"], strict=True)
    ratios = spread([theirs / own for theirs, own in pairs])
    bound = other["bound_ms"] / ours["bound_ms"] if key == "end_to_end_ms" else None
    return {
        "name": name,
        "target": target,
        "ratio": ratios,
        "ratio_of_bounds": bound,
        "is_met": ratios["median"] >= target,
    }


def _target_line(target: Mapping[str, Any]) -> str:
    bound = target["ratio_of_bounds"]
    bounds = "" if bound is None else f"; ratio of the bounds {bound:.2f}"
    verdict = "met" if target["is_met"] else "missed"
    ratio = _cell(target["ratio"], 2)
    return f"{target['name']}: {ratio}, target {target['target']:.3g}: {verdict}{bounds}"


def _milliseconds(seconds: Sequence[float]) -> dict[str, Any]:
    return spread([value / MILLI for value in seconds])


def _cell(values: Mapping[str, Any], digits: int) -> str:
    median, least, most = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({least}, {most})"
