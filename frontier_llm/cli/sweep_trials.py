"""Read the trials of a sweep, and find their axes and the best trials.

An axis is a setting that differs between the trials of a sweep.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frontier_llm.cli.trial import TRIAL_FILE, Trial


def read(sweep_dir: Path) -> list[Trial]:
    """Read all trials of a sweep, the best first, and of repeated settings the first.

    Raises:
        DataError: the file of a trial is damaged.
    """
    return [trial for _, trial in read_with_folders(sweep_dir)]


def read_with_folders(sweep_dir: Path) -> list[tuple[Path, Trial]]:
    """Do the same as `read`; return each trial with its folder.

    Raises:
        DataError: the file of a trial is damaged.
    """
    settings: dict[frozenset[str], tuple[Path, Trial]] = {}
    for path in sorted(sweep_dir.rglob(TRIAL_FILE)):
        trial = Trial.read(path.parent)
        settings.setdefault(frozenset(trial.overrides), (path.parent, trial))
    return sorted(settings.values(), key=lambda found: (found[1].cost, found[1].status != "done"))


def read_in_order(sweep_dir: Path) -> list[Trial]:
    """Read the trials in the folders `0`, `1`, ... of a sweep, in this order.

    Raises:
        DataError: the file of a trial is damaged.
    """
    folders = [path.parent for path in sweep_dir.glob(f"*/{TRIAL_FILE}")]
    numbered = [folder for folder in folders if folder.name.isdigit()]
    return [Trial.read(folder) for folder in sorted(numbered, key=lambda path: int(path.name))]


def axes(trials: Sequence[Trial]) -> dict[str, list[str]]:
    """Return the keys that have more than one value in a sweep.

    Returns:
        For each key its values in the order of the trials; `-` for a trial that does not set it.
    """
    settings = [
        dict(override.lstrip("+").split("=", 1) for override in trial.overrides) for trial in trials
    ]
    keys = sorted({key for setting in settings for key in setting})
    columns = {key: [setting.get(key, "-") for setting in settings] for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def sensitivity(trials: Sequence[Trial]) -> dict[str, float]:
    """Divide the variance of the trials' results among the axes, the largest share first.

    A linear model of the results has an effect for each value of an axis. The axis that explains
    most of the variance comes first. Each further axis gets what it explains beyond those before it
    (sequential sums of squares). So the shares add up to at most 1. The rest is due to combinations
    of values, and to noise. A trial that is not done counts with speed 0, so that an axis whose
    values fail has influence, or with the highest loss of those that are done.
    """
    limit = max((trial.cost for trial in done_trials(trials)), default=0.0)
    losses = trials[0].goal == "loss"
    numbers = np.array([min(t.cost, limit) if losses else t.cost for t in trials])
    columns = {key: _effects(values) for key, values in axes(trials).items()}
    model, explained = np.ones((len(trials), 1)), 0.0
    shares: dict[str, float] = {}
    while columns:
        totals = {
            key: _explained(np.hstack([model, effects]), numbers)
            for key, effects in columns.items()
        }
        best = max(totals, key=lambda key: totals[key])
        shares[best] = max(0.0, totals[best] - explained)
        model, explained = np.hstack([model, columns.pop(best)]), max(explained, totals[best])
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def by_chance(trials: Sequence[Trial]) -> float:
    """Return the share of the variance that axes without any influence explain on average.

    A model of e independent effects explains e / (n - 1) of the variance of n random speeds.
    """
    effects = sum(len(set(values)) - 1 for values in axes(trials).values())
    return min(1.0, effects / max(1, len(trials) - 1))


def _effects(values: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return a column per value of an axis, with 1 for the trials that have it."""
    return np.array([[value == other for other in sorted(set(values))] for value in values], float)


def _explained(columns: npt.NDArray[np.float64], numbers: npt.NDArray[np.float64]) -> float:
    """Return the share of the variance of the numbers that a linear model of columns explains."""
    fitted = columns @ np.linalg.lstsq(columns, numbers, rcond=None)[0]
    total = float(np.var(numbers))
    return 1 - float(np.mean((numbers - fitted) ** 2)) / total if total else 0.0


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Return the done trials that no other trial beats in both value and memory, the best first."""
    front: list[Trial] = []
    for trial in sorted(done_trials(trials), key=lambda trial: (trial.cost, peak_memory(trial))):
        if not front or peak_memory(trial) < peak_memory(front[-1]):
            front.append(trial)
    return front


def done_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that are done."""
    return [trial for trial in trials if trial.status == "done"]


def peak_memory(trial: Trial) -> int:
    """Return the peak memory of a trial in bytes; 0 if it is unknown."""
    return trial.peak_bytes or 0
