"""Read the trials of a sweep, and find their axes and the best trials.

An axis is a setting that differs between the trials of a sweep.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pvariance

from frontier_llm.cli.trial import TRIAL_FILE, Trial


def read(sweep_dir: Path) -> list[Trial]:
    """Read all trials of a sweep, the fastest first.

    Raises:
        DataError: the file of a trial is damaged.
    """
    found = [Trial.read(path.parent) for path in sweep_dir.rglob(TRIAL_FILE)]
    return sorted(found, key=lambda trial: -trial.speed)


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
    """Return the share of the variance of the speed that each axis explains, largest first.

    For each value of an axis, take the mean speed of the trials with this value. The share is the
    variance of these means, weighted by their numbers of trials, divided by the variance of all
    speeds. An axis without influence has the share 0. An axis that alone determines the speed has
    the share 1. A trial that is not done counts with speed 0, so that an axis whose values fail has
    influence.
    """
    total = pvariance([trial.speed for trial in trials])
    shares = {key: variance_between(values, trials) / total if total else 0.0
              for key, values in axes(trials).items()}  # fmt: skip
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Return the done trials that no other trial beats in both speed and memory, fastest first."""
    front: list[Trial] = []
    by_speed = sorted(done_trials(trials), key=lambda trial: (-trial.speed, peak_memory(trial)))
    for trial in by_speed:
        if not front or peak_memory(trial) < peak_memory(front[-1]):
            front.append(trial)
    return front


def variance_between(values: Sequence[str], trials: Sequence[Trial]) -> float:
    """Return the variance of the speeds if each trial had the mean speed of its value."""
    groups: dict[str, list[float]] = defaultdict(list)
    for value, trial in zip(values, trials, strict=True):
        groups[value].append(trial.speed)
    return pvariance([fmean(group) for group in groups.values() for _ in group])


def done_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that are done."""
    return [trial for trial in trials if trial.status == "done"]


def peak_memory(trial: Trial) -> int:
    """Return the peak memory of a trial in bytes; 0 if it is unknown."""
    return trial.peak_bytes or 0
