"""Draw the charts of a sweep's report, and compare how fast searches find good trials."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from frontier_llm.cli.sweep_trials import Trial, done_trials, markdown_table, pareto, peak_memory
from frontier_llm.units import GIB

_LABELLED = 8
"""Number of trials that the legend of their losses names."""
Curve = Sequence[float]
"""The best value so far of one search, after each of its trials."""


def draw_pareto(trials: Sequence[Trial], path: Path) -> None:
    """Draw value against memory of all done trials, and a line through those of `pareto`."""
    figure, axis = _figure()
    front, quantity = pareto(trials), trials[0].quantity
    better = "faster" if trials[0].goal != "loss" else "better"
    axis.scatter(*_memory_and_value(done_trials(trials)), color="#888")
    axis.plot(
        *_memory_and_value(front), "o-", color="#c33", label=f"no trial is {better} and smaller"
    )
    axis.set_xlabel("peak memory of the rank that used most, GiB")
    axis.set_ylabel(quantity)
    if front:
        axis.legend()
    figure.savefig(path)


def draw_losses(runs: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Draw (step, loss in nats per token) of trials over each other, the best first."""
    figure, axis = _figure()
    for number, (settings, points) in enumerate(runs.items()):
        label = settings if number < _LABELLED else None
        axis.plot(*zip(*points, strict=True), label=label, color=None if label else "#ccc")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, nats per token")
    axis.legend(fontsize="small")
    figure.savefig(path)


def draw_convergence(searches: Mapping[str, Sequence[Curve]], quantity: str, path: Path) -> None:
    """Draw the best value so far: the median and the range of each group of searches.

    The vertical axis shows the values after a fifth of the trials. Failed first trials would
    compress the later differences.
    """
    figure, axis = _figure()
    shown: list[float] = []
    for (name, curves), colour in zip(searches.items(), ("#36c", "#c33", "#393"), strict=False):
        low, middle, high = spread(curves)
        numbers = range(1, len(middle) + 1)
        axis.fill_between(numbers, low, high, step="post", alpha=0.15, color=colour)
        axis.step(numbers, middle, where="post", color=colour, label=name)
        shown += [*low[len(low) // 5 :], *high[len(high) // 5 :]]
    margin = 0.05 * (max(shown) - min(shown)) or 1.0
    axis.set_ylim(min(shown) - margin, max(shown) + margin)
    axis.set_xlabel("trials")
    axis.set_ylabel(f"best so far: {quantity}")
    axis.legend()
    figure.savefig(path)


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7, 4), layout="constrained")


def _memory_and_value(trials: Sequence[Trial]) -> tuple[list[float], list[float]]:
    """Return the memory in GiB and the value of each trial."""
    memory = [peak_memory(trial) / GIB for trial in trials]
    return memory, [trial.value for trial in trials]


def best_so_far(trials: Sequence[Trial]) -> list[float]:
    """Return the best value (highest speed or lowest loss) after each trial of a search."""
    best = min if trials and trials[0].goal == "loss" else max
    return list(accumulate((trial.value for trial in trials), best))


def spread(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Return the lowest, median and highest value after each trial of the shortest search."""
    columns = list(zip(*curves, strict=False))
    return [min(c) for c in columns], [median(c) for c in columns], [max(c) for c in columns]


def convergence_table(searches: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Return the best values after some numbers of trials as lines of Markdown.

    A group of several searches is written as its median, and in parentheses its lowest and
    highest value.
    """
    longest = max(len(curve) for curves in searches.values() for curve in curves)
    rows = [
        [str(count), *(_cell([c[count - 1] for c in curves if len(c) >= count]) for curves in
                       searches.values())]
        for count in _counts(longest)
    ]  # fmt: skip
    return markdown_table(["trials", *searches], rows)


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
