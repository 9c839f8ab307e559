"""Draw the charts of a sweep's report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier_llm.cli.sweep_convergence import Curve, spread
from frontier_llm.cli.sweep_trials import done_trials, pareto, peak_memory
from frontier_llm.cli.trial import Trial
from frontier_llm.units import GIB

_LABELLED = 8
"""Number of trials that the legend of their losses names."""


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
    """Draw the training losses of trials over each other.

    Args:
        runs: (step, loss in nats per token) of each trial, by its settings, the best first.
    """
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
