"""Compare how fast searches find good trials: the best value so far after each trial."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median

from frontier_llm.cli.trial import Trial

Curve = Sequence[float]
"""The best value so far of one search, after each of its trials."""


def best_so_far(trials: Sequence[Trial]) -> list[float]:
    """Return the best value after each trial of a search, in the order of the trials.

    The best is the highest speed, or the lowest loss if that is the goal.
    """
    best = min if trials and trials[0].goal == "loss" else max
    return list(accumulate((trial.value for trial in trials), best))


def spread(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Return the lowest, the median and the highest of several searches after each trial.

    They end with the shortest search.
    """
    columns = list(zip(*curves, strict=False))
    return [min(c) for c in columns], [median(c) for c in columns], [max(c) for c in columns]


def convergence_table(searches: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Return the best values after some numbers of trials as lines of Markdown.

    Args:
        searches: the curves of each group of searches, by its name. A group of several searches is
            written as its median, and in parentheses its lowest and highest value.
    """
    longest = max(len(curve) for curves in searches.values() for curve in curves)
    lines = ["| trials | " + " | ".join(searches) + " |", "|" + "---|" * (len(searches) + 1)]
    for count in _counts(longest):
        cells = [_cell([c[count - 1] for c in curves if len(c) >= count]) for curves in
                 searches.values()]  # fmt: skip
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return lines


def _counts(longest: int) -> list[int]:
    """Return the numbers of trials of the table: 10, 20, 50, 100, ... and the last."""
    counts = [digit * 10**power for power in range(1, 6) for digit in (1, 2, 5)]
    return [*(count for count in counts if count < longest), longest]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
