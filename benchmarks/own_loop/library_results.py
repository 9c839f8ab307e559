"""Rows and tables of bench_library.py."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.own_loop.loops import Precision
from benchmarks.own_loop.turns import SaveFigures, SpeedFigures
from frontier_llm.errors import TrainingError

MEGA = 1e6
BASELINES = ("fsdp2", "fsdp2-prefetch")
"""Contenders that free parameters as the library does. The faster one is the baseline of ratios."""
LARGEST_DIFFERENCE: Mapping[Precision, float] = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest relative difference between the losses of two contenders in the same step. In bf16 the
contenders round sums of gradients differently."""


@dataclass
class SpeedOutcome:
    """Results of one contender without saves: the measurements of all ranks, by round."""

    contender: str
    rounds: list[list[SpeedFigures]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Time of a step, by round. All ranks measure the same time, from barrier to barrier."""
        return [max(rank.step_seconds for rank in ranks) for ranks in self.rounds]

    def mean(self, name: str) -> float | None:
        """Return the median over rounds of the mean over ranks of a field of SpeedFigures."""
        rounds = [[getattr(rank, name) for rank in ranks] for ranks in self.rounds]
        if any(value is None for ranks in rounds for value in ranks):
            return None
        return statistics.median(statistics.fmean(ranks) for ranks in rounds)

    def speedups(self, baseline: "SpeedOutcome") -> list[float]:
        """Return the time of the baseline divided by the time of this contender, by round."""
        pairs = zip(baseline.seconds, self.seconds, strict=True)
        return [base / own for base, own in pairs]

    def to_row(self, baseline: "SpeedOutcome") -> dict[str, Any]:
        """Return all values, for JSON."""
        return {
            "contender": self.contender,
            "step_seconds": spread(self.seconds),
            "baseline": baseline.contender,
            "speedup": spread(self.speedups(baseline)),
            "sent_bytes": self.mean("sent_bytes"),
            "counted_bytes": self.mean("counted_bytes"),
            "cpu_seconds": self.mean("cpu_seconds"),
            "idle_share": self.mean("idle_share"),
            "other_cores": statistics.median(map(_other_cores, self.rounds)),
            "losses": self.rounds[0][0].losses,
            "rounds": [[asdict(rank) for rank in ranks] for ranks in self.rounds],
        }


@dataclass
class SaveOutcome:
    """Results of one saver: the measurements of all ranks, by round."""

    saver: str
    rounds: list[list[SaveFigures]] = field(default_factory=list)

    @property
    def blocked(self) -> list[float]:
        """Seconds per step for which saves block the loop, by round; the slowest rank counts."""
        return [max(rank.blocked_seconds for rank in ranks) for ranks in self.rounds]

    @property
    def slowdowns(self) -> list[float]:
        """Time of a step with saves, divided by the time without, by round."""
        return [ranks[0].step_seconds / ranks[0].plain_step_seconds for ranks in self.rounds]

    @property
    def added(self) -> list[float]:
        """Seconds that saves add to a step, by round."""
        return [ranks[0].step_seconds - ranks[0].plain_step_seconds for ranks in self.rounds]

    def to_row(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return {
            "saver": self.saver,
            "blocked_seconds": spread(self.blocked),
            "slowdown": spread(self.slowdowns),
            "added_seconds": spread(self.added),
            "step_seconds": spread([ranks[0].step_seconds for ranks in self.rounds]),
            "rounds": [[asdict(rank) for rank in ranks] for ranks in self.rounds],
        }


def baseline_of(outcomes: Sequence[SpeedOutcome]) -> SpeedOutcome:
    """Return the one of `BASELINES` whose median time is shorter."""
    found = [outcome for outcome in outcomes if outcome.contender in BASELINES]
    return min(found, key=lambda outcome: statistics.median(outcome.seconds))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the minimum, the maximum and all values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def check_losses(outcomes: Sequence[SpeedOutcome], precision: Precision) -> float:
    """Compare the losses of all contenders, rounds, ranks and steps; return the largest difference.

    Returns:
        The largest difference from the first contender, relative to its loss.

    Raises:
        TrainingError: it exceeds `LARGEST_DIFFERENCE`, so the contenders do not train alike.
    """
    expected = [rank.losses for rank in outcomes[0].rounds[0]]
    limit, largest = LARGEST_DIFFERENCE[precision], 0.0
    for outcome in outcomes:
        for ranks in outcome.rounds:
            for wanted, rank in zip(expected, ranks, strict=True):
                pairs = zip(wanted, rank.losses, strict=True)
                differences = [abs(one - other) / one for one, other in pairs]
                difference = max(differences)
                if not all(one <= limit for one in differences):  # also if one is not a number
                    raise TrainingError(
                        f"the losses of {outcome.contender} in {precision} differ from those of "
                        f"{outcomes[0].contender} by {difference:.1e} of the loss; the limit is "
                        f"{limit:.0e}: {rank.losses} instead of {wanted}"
                    )
                largest = max(largest, difference)
    return largest


def speed_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per contender; bench_library.py explains the columns."""
    table = _table(
        title, "contender", "step\nms", "min..max", f"speed over\n{rows[0]['baseline']}",
        "min..max", "sent\nMB", "counted\nMB", "CPU\nms", "idle\n%", "other\ncores",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["contender"], *_cells(row["step_seconds"], 1000, 0), *_cells(row["speedup"], 1, 2),
            _fixed(row["sent_bytes"], 1 / MEGA, 1), _fixed(row["counted_bytes"], 1 / MEGA, 1),
            _fixed(row["cpu_seconds"], 1000, 0), _fixed(row["idle_share"], 100, 0),
            _fixed(row["other_cores"], 1, 1),
        )  # fmt: skip
    return table


def save_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per saver; bench_library.py explains the columns."""
    table = _table(
        title, "saver", "blocked\nms per step", "min..max", "slowdown", "min..max",
        "added\nms per step", "step\nms",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["saver"], *_cells(row["blocked_seconds"], 1000, 1), *_cells(row["slowdown"], 1, 2),
            _fixed(row["added_seconds"]["median"], 1000, 0),
            _fixed(row["step_seconds"]["median"], 1000, 0),
        )  # fmt: skip
    return table


def _other_cores(ranks: Sequence[SpeedFigures]) -> float:
    """Return how many cores other programs used during the timed steps of a round."""
    first, cores = ranks[0], os.cpu_count() or 1
    own = sum(rank.cpu_seconds for rank in ranks) / first.step_seconds
    return max(0.0, cores * (1 - first.idle_share) - own)


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=HORIZONTALS, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(values: Mapping[str, Any], factor: float, digits: int) -> tuple[str, str]:
    """Return the median, and the minimum and the maximum."""
    low, high = _fixed(values["min"], factor, digits), _fixed(values["max"], factor, digits)
    return _fixed(values["median"], factor, digits), f"{low}..{high}"


def _fixed(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
