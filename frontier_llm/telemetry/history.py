"""Read metrics.jsonl, the numbers of all steps of a run, for reports and benchmarks.

A run that was killed can be read as well, although the last line of its file may be incomplete.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frontier_llm.geometry.grid import LEVELS
from frontier_llm.geometry.wire import Sent
from frontier_llm.telemetry.jsonl import LARGEST, read_rows

_COLLECTIVES = 40
"""Largest number of collectives whose bytes are reported."""


class History:
    """The steps of a run as columns of numbers. A value that is null or absent reads as NaN.

    If two lines have the same step, the later line is used. `damaged` has the numbers of lines
    that are left out.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], damaged: Sequence[int] = ()) -> None:
        self.damaged = damaged
        by_step = {row["step"]: row for row in rows}
        self._rows = [by_step[step] for step in sorted(by_step)]

    @classmethod
    def read(cls, run_dir: Path) -> "History":
        """Read the metrics of a run directory; return an empty history if there are none."""
        try:
            return cls(*read_rows(run_dir))
        except OSError:
            return cls([])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def steps(self) -> list[int]:
        """Step numbers, ascending."""
        return [row["step"] for row in self._rows]

    @property
    def skipped(self) -> list[int]:
        """Steps whose update was skipped."""
        return [row["step"] for row in self._rows if row.get("skipped") is True]

    def column(self, name: str) -> list[float]:
        """Return the numbers of a column, one per step."""
        return [_number(row.get(name)) for row in self._rows]

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return (step, number) for the steps at which the number of a column is finite."""
        pairs = zip(self.steps, self.column(name), strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def last(self, name: str) -> float | None:
        """Return the last finite number of a column; None if there is none."""
        point = self.last_point(name)
        return point and point[1]

    def last_point(self, name: str, since: int = 0) -> tuple[int, float] | None:
        """Return the last of `points`, of steps after `since`; None if there is none."""
        point = next(reversed(self.points(name)), None)
        return point if point and point[0] > since else None

    def total(self, name: str) -> float:
        """Return the sum of the finite numbers of a column."""
        return math.fsum(value for _, value in self.points(name))

    def typical(self, name: str) -> float | None:
        """Return the median of a column; None if the column has no finite number.

        The first tenth of the steps, at least one, is left out as warm-up.
        """
        values = [value for _, value in self.points(name)]
        after_warm_up = values[max(1, len(values) // 10) :] or values
        return statistics.median(after_warm_up) if after_warm_up else None

    def sent_bytes_per_step(self, column: str = "sent_bytes") -> dict[str, Sent]:
        """Return the mean bytes per step of each collective that has sent any bytes."""
        totals: dict[str, Sent] = {}
        for row in self._rows:
            for name, links in _mapping(row.get(column)).items():
                sent = Sent(*(_number(_mapping(links).get(level)) for level in LEVELS))
                if math.isfinite(sent.total):
                    totals[name] = totals.get(name, Sent()) + sent
        share = 1 / max(1, len(self._rows))
        largest = sorted(totals.items(), key=lambda item: -item[1].total)[:_COLLECTIVES]
        return {name: sent * share for name, sent in largest if sent.total > 0}


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and abs(value) <= LARGEST
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
