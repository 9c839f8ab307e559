"""Results of a contender of bench_sharding.py over all rounds, and the table of all contenders."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.peers.turn import RankFigures, Turn
from frontier_llm.units import MIB

MEGA = 1e6


@dataclass
class Outcome:
    """Results of one contender under one set of conditions."""

    contender: str
    tokens_per_second: list[float] = field(default_factory=list)
    """Speed of all ranks together, one value per round."""
    step_seconds: list[list[float]] = field(default_factory=list)
    """Times of rank 0's steps, one list per round."""
    first_loss: float = math.nan
    """Loss before the first update: on rank 0, or over all ranks for frontier_llm. All libraries
    except frontier_llm start with the same weights, so their first losses are equal. frontier_llm
    draws other weights, so its first loss differs a little."""
    last_loss: float = math.nan
    """Loss of the last step."""
    parameters: int = 0
    peak_bytes: int = 0
    """Peak memory of the rank that uses most, over all rounds."""
    own_bytes: int = 0
    """Peak memory minus the memory before the model was built, of the rank with the most growth."""
    sent_bytes: list[float] = field(default_factory=list)
    """Bytes per rank and step by the counter of the interface, mean over ranks, one per round."""
    counted_bytes: float | None = None
    """Bytes per rank and step as counted by frontier_llm."""
    idle_share: list[float] = field(default_factory=list)
    """Idle share of all cores' time during the timed steps, mean over ranks, one per round."""
    planned_seconds: float | None = None
    """Step that the planner predicts; None without --plan, and for other libraries."""
    error: str | None = None
    """Why the contender failed; the rounds before that are kept."""

    def add(self, turn: Turn, ranks: Sequence[RankFigures]) -> None:
        """Add a round.

        Raises:
            ValueError: a loss is not finite.
        """
        if not all(math.isfinite(loss) for rank in ranks for loss in rank.losses):
            raise ValueError(f"a loss is not finite: {[rank.losses for rank in ranks]}")
        mean_step_seconds = statistics.mean(statistics.mean(rank.step_seconds) for rank in ranks)
        self.tokens_per_second.append(turn.tokens_per_step / mean_step_seconds)
        self.step_seconds.append(list(ranks[0].step_seconds))
        self.first_loss, self.last_loss = ranks[0].losses[0], ranks[0].losses[-1]
        self.parameters = ranks[0].parameters
        self.peak_bytes = max(self.peak_bytes, *(rank.peak_bytes for rank in ranks))
        growths = (rank.peak_bytes - rank.start_bytes for rank in ranks)
        self.own_bytes = max(self.own_bytes, *growths)
        sent = [rank.sent_bytes for rank in ranks if rank.sent_bytes is not None]
        counted = [rank.counted_bytes for rank in ranks if rank.counted_bytes is not None]
        idle = [rank.idle_share for rank in ranks if rank.idle_share is not None]
        self.idle_share += [statistics.mean(idle)] if idle else []
        self.sent_bytes += [statistics.mean(sent)] if sent else []
        self.counted_bytes = statistics.mean(counted) if counted else None

    def ratios(self, baseline: "Outcome") -> list[float]:
        """Return the tokens/s divided by those of the baseline, one ratio per round."""
        pairs = zip(self.tokens_per_second, baseline.tokens_per_second, strict=False)
        return [speed / baseline_speed for speed, baseline_speed in pairs]

    def planned_ratio(self, baseline: "Outcome") -> float | None:
        """Return the predicted ratio of speeds; None if a prediction is missing."""
        if self.planned_seconds is None or baseline.planned_seconds is None:
            return None
        return baseline.planned_seconds / self.planned_seconds

    def to_dict(self, baseline: "Outcome") -> dict[str, Any]:
        """Return all values, for JSON."""
        ratios = self.ratios(baseline)
        return {
            "contender": self.contender,
            "median_tokens_per_second": _median(self.tokens_per_second),
            "baseline": baseline.contender,
            "median_ratio": _median(ratios),
            "ratios": ratios,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "parameters": self.parameters,
            "peak_bytes": self.peak_bytes,
            "own_bytes": self.own_bytes,
            "sent_bytes": self.sent_bytes,
            "counted_bytes": self.counted_bytes,
            "idle_share": self.idle_share,
            "planned_seconds": self.planned_seconds,
            "planned_ratio": self.planned_ratio(baseline),
            "error": self.error,
        }


def make_table(title: str, outcomes: Sequence[Outcome], baseline: Outcome) -> Table:
    """Return a table with one row per contender; bench_sharding.py explains the columns."""
    table = Table(title=title, title_justify="left", box=HORIZONTALS, pad_edge=False)
    table.add_column("contender", no_wrap=True)
    has_links = any(outcome.sent_bytes for outcome in outcomes)
    sent = ("sent\nMB", "counted\nMB") if has_links else ("counted\nMB",)
    ratio = f"of\n{baseline.contender}"
    planned = ("planned",) if baseline.planned_seconds is not None else ()
    for heading in (
        "tokens/s",
        "min..max",
        ratio,
        *planned,
        "idle\n%",
        "own\nMiB",
        "peak\nMiB",
        *sent,
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_cells(outcome, baseline, has_links))
    return table


def _cells(outcome: Outcome, baseline: Outcome, has_links: bool) -> list[str]:
    """Return the row of a contender; without simulated links there is no column of bytes sent."""
    if not outcome.tokens_per_second:
        return [outcome.contender, "failed"]
    speeds, ratios = outcome.tokens_per_second, outcome.ratios(baseline)
    counted = outcome.counted_bytes
    return [
        outcome.contender + (" (failed later)" if outcome.error else ""),
        f"{statistics.median(speeds):.0f}",
        f"{min(speeds):.0f}..{max(speeds):.0f}",
        f"{statistics.median(ratios):.2f}" if ratios else "-",
        *([] if baseline.planned_seconds is None else [_fixed(outcome.planned_ratio(baseline))]),
        f"{100 * statistics.median(outcome.idle_share):.0f}" if outcome.idle_share else "-",
        f"{outcome.own_bytes / MIB:.0f}",
        f"{outcome.peak_bytes / MIB:.0f}",
        *([f"{statistics.median(outcome.sent_bytes) / MEGA:.2f}"] if has_links else []),
        "-" if counted is None else f"{counted / MEGA:.2f}",
    ]


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
