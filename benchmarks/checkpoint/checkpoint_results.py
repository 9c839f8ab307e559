"""Summarise the rounds of each saver of bench_checkpoint, and build the table of all savers."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.checkpoint.checkpoint_turn import Save, SaverFigures
from benchmarks.testbed.disk import DiskFigures

GIGA = 1e9
MEGA = 1e6
MILLI = 1e-3


@dataclass
class DiskOutcome:
    """Speed of the disk alone, in bytes per second of all ranks together."""

    rounds: list[list[DiskFigures]] = field(default_factory=list)
    """Measurements of each rank, by round."""

    @property
    def write_rate(self) -> float:
        """Write rate in bytes per second; median over rounds."""
        return self._rate("write_seconds")

    @property
    def read_rate(self) -> float:
        """Read rate in bytes per second, with or without the page cache; the better median."""
        return max(self._rate("read_seconds"), self._rate("cached_read_seconds"))

    def _rate(self, field_name: str) -> float:
        """Return the rate for a field of DiskFigures with seconds; the slowest rank counts."""
        return statistics.median(
            sum(rank.size for rank in ranks) / max(getattr(rank, field_name) for rank in ranks)
            for ranks in self.rounds
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all measurements for JSON."""
        return {
            "write_bytes_per_second": self.write_rate,
            "direct_read_bytes_per_second": self._rate("read_seconds"),
            "cached_read_bytes_per_second": self._rate("cached_read_seconds"),
            "rounds": [[asdict(rank) for rank in ranks] for ranks in self.rounds],
        }


@dataclass
class Outcome:
    """Results of one saver. The slowest rank of each save and of each restore counts."""

    saver: str
    what: str
    """Description of the saver."""
    rounds: list[list[SaverFigures]] = field(default_factory=list)
    """Measurements of each rank, by round."""
    error: str | None = None
    """Why the saver did not finish; earlier rounds are kept. None if it finished."""

    @property
    def blocked_seconds(self) -> float:
        """Seconds that a save blocked training, at its start and before the update; median."""
        return statistics.median(
            max(rank.begin_seconds + rank.fence_seconds for rank in save) for save in self._saves()
        )

    @property
    def durable_seconds(self) -> float | None:
        """Median seconds until a save was on disk and complete on all ranks; None: unknown."""
        by_save = [[rank.durable_seconds for rank in save] for save in self._saves()]
        known = [max(s for s in save if s is not None) for save in by_save if None not in save]
        return statistics.median(known) if known else None

    @property
    def compute_share(self) -> float | None:
        """Median speed of the products during a save, as a fraction of the speed without a save."""
        shares = [rank.compute_share for save in self._saves() for rank in save]
        known = [share for share in shares if share is not None]
        return statistics.median(known) if known else None

    @property
    def step_ratio(self) -> float:
        """Median time of a long step with a save, divided by that of the step before."""
        return statistics.median(
            max(rank.step_seconds for rank in save) / max(rank.plain_step_seconds for rank in save)
            for save in self._saves()
        )

    @property
    def short_ratio(self) -> float:
        """Median time of short steps with saves, divided by that of as many without saves."""
        return statistics.median(
            max(rank.short_seconds for rank in ranks)
            / max(rank.plain_short_seconds for rank in ranks)
            for ranks in self.rounds
        )

    @property
    def restore_rate(self) -> float | None:
        """Median bytes per second that all ranks together restore; None: it cannot restore."""
        rates = [
            sum(rank.states_bytes for rank in ranks) / max(seconds)
            for ranks in self.rounds
            for seconds in zip(*(rank.restore_seconds for rank in ranks), strict=True)
        ]
        return statistics.median(rates) if rates else None

    def to_dict(self) -> dict[str, Any]:
        """Return all measurements for JSON."""
        names = ("blocked_seconds", "durable_seconds", "compute_share", "step_ratio",
                 "short_ratio", "restore_rate")  # fmt: skip
        return {
            "saver": self.saver,
            "what": self.what,
            **({name: getattr(self, name) for name in names} if self.rounds else {}),
            "error": self.error,
            "rounds": [[asdict(rank) for rank in ranks] for ranks in self.rounds],
        }

    def _saves(self) -> Iterator[tuple[Save, ...]]:
        """Yield the measurements of all ranks for each save."""
        for ranks in self.rounds:
            yield from zip(*(rank.saves for rank in ranks), strict=True)


def make_table(title: str, outcomes: Sequence[Outcome], disk: DiskOutcome) -> Table:
    """Return the table of all outcomes, in the order of the turns."""
    table = Table(title=title, title_justify="left", box=HORIZONTALS, pad_edge=False)
    table.add_column("saver", no_wrap=True)
    for heading in ("blocked\nms", "durable\ns", "compute\nmeanwhile", "long\nstep",
                    "short\nsteps", "restore\ns", "of disk's\nrate", "on disk\nMB"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(outcome.saver, *_cells(outcome, disk))
    table.caption = (
        f"the disk alone: writes {disk.write_rate / GIGA:.2f} GB/s, reads "
        f"{disk.read_rate / GIGA:.2f} GB/s"
    )
    table.caption_justify = "left"
    return table


def _cells(outcome: Outcome, disk: DiskOutcome) -> list[str]:
    """Return the columns of a saver after its name."""
    if not outcome.rounds:
        return ["failed"]
    durable, share = outcome.durable_seconds, outcome.compute_share
    rate, ranks = outcome.restore_rate, outcome.rounds[0]
    return [
        f"{outcome.blocked_seconds / MILLI:.1f}",
        "-" if durable is None else f"{durable:.2f}",
        "-" if share is None else f"{share:.2f}",
        f"{outcome.step_ratio:.3f}",
        f"{outcome.short_ratio:.2f}",
        "-" if rate is None else f"{sum(rank.states_bytes for rank in ranks) / rate:.2f}",
        "-" if rate is None else f"{rate / disk.read_rate:.0%}",
        f"{ranks[0].disk_bytes / MEGA:.0f}",
    ]
