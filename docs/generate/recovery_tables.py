"""The tables of docs/recovery.md, from benchmarks/results/recovery.json."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from docs.generate.results import load

PREDICTED = {"cost": "1", "copies": "1.04"}
"""Ratios that the docstring of benchmarks/bench_recovery.py derives."""


def deaths() -> Iterator[str]:
    """Yield the outcome of the kills of ranks and of nodes."""
    rows = []
    for series in load("recovery")["deaths"]:
        seconds = sorted(series["seconds"])
        rows.append(
            (
                series["name"],
                series["processes_killed"],
                series["steps_compared"],
                len(series["problems"]),
                f"{median(seconds):.2f} s",
                f"{seconds[int(0.95 * len(seconds))]:.2f} s",
                f"{seconds[-1]:.2f} s",
            )
        )
    head = (
        "killed",
        "processes",
        "steps",
        "differences",
        "to the next step, median",
        "95%",
        "worst",
    )
    yield from _table(head, rows)


def slurm() -> Iterator[str]:
    """Yield the outcome of faults in jobs of Slurm."""
    rows = [
        (
            row["fault"],
            "-" if row["seconds_to_step"] is None else f"{row['seconds_to_step']:.1f} s",
            row["steps_done_twice"],
            row["job"],
            "-"
            if row["largest_loss_difference"] is None
            else f"{row['largest_loss_difference']:g}",
        )
        for row in load("recovery")["slurm"]
    ]
    head = ("fault", "next step after", "steps done twice", "the job", "largest loss difference")
    yield from _table(head, rows)


def cost() -> Iterator[str]:
    """Yield the ratios of step times, and the effective training time."""
    results = load("recovery")
    names = {
        "cost": "step time with `recovery.enabled` over without",
        "copies": "step time with `recovery.partner_copies` over without, 113 MB per rank",
    }
    rows = []
    for part, name in names.items():
        ratios = sorted(results[part]["ratios"])
        spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        rows.append((name, spread, PREDICTED[part]))
    found = results["goodput"]
    name = f"effective training time, {found['kills']} kills, {found['mtbf']:.0f} s apart"
    rows.append((name, f"{found['measured']:.3f}", f"{found['predicted']:.3f}"))
    yield from _table(("figure", "measured", "predicted"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


TABLES: Mapping[str, Any] = {"deaths": deaths, "slurm": slurm, "cost": cost}
