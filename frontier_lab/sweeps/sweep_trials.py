"""Store and read the trials of a sweep, and find their axes and the best trials.

An axis is a setting that differs between the trials of a sweep.
"""

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from frontier_llm.atomic_files import replace_text
from frontier_llm.config.launch import TrialValue
from frontier_llm.errors import DataError
from frontier_llm.units import format_count

TRIAL_FILE = "trial.json"

Status = Literal["done", "refused", "out of memory", "failed", "too slow"]
"""How a trial ended: "refused" if its configuration is invalid, "too slow" at its time limit."""

ONLY_CHANCE = (
    "These settings change the losses and hardly the speed, so the order of the trials is chance; "
    "to rank them by validation loss, sweep with launch.trial_value=loss."
)
"""A note on searches for speed along axes that do not change it, such as learning rates."""
WORST_LOSS = 1e9
"""The loss that a search receives for a trial that is not done."""


@dataclass(frozen=True)
class Trial:
    """The result of one short run."""

    overrides: list[str]
    status: Status
    reason: str
    """The last output on stderr of a trial that is not done; otherwise empty."""
    seconds: float
    """Duration of the process, including its start."""
    tokens_per_second: float
    """Median of the steps after the warm-up; 0 if the trial is not done."""
    peak_bytes: int | None
    """Peak memory of the rank that used most; None if it is unknown."""
    loss: float | None
    """Training loss of the last step, in nats per token; None if the trial is not done."""
    validation_loss: float | None
    """Validation loss after the last step, in nats per token."""
    ranks: int | None = None
    """Number of ranks, each of which has one device; None if it is unknown."""
    goal: TrialValue = "speed"
    """Quantity that the search optimises (launch.trial_value)."""

    @property
    def value(self) -> float:
        """The value that a search receives: `speed`, or the validation loss if that is the goal."""
        if {"speed": False, "speed_per_device": False, "loss": True}[self.goal]:
            return WORST_LOSS if self.validation_loss is None else self.validation_loss
        return self.speed

    @property
    def cost(self) -> float:
        """`value` if it is a loss, otherwise the negative speed: the best trial has the lowest."""
        return self.value if self.goal == "loss" else -self.value

    @property
    def quantity(self) -> str:
        """Name of `value`, with its unit."""
        return "validation loss" if self.goal == "loss" else self.speed_unit

    @property
    def speed(self) -> float:
        """Tokens per second, per device if that is the goal; 0 if the trial is not done."""
        if self.goal == "speed_per_device":
            return self.tokens_per_second / self.ranks if self.ranks else 0.0
        return self.tokens_per_second

    @property
    def speed_unit(self) -> str:
        """The unit of `speed`."""
        return "tokens/s per device" if self.goal == "speed_per_device" else "tokens/s"

    @property
    def speed_number(self) -> str:
        """`speed` as text, without its unit."""
        is_small = self.goal == "speed_per_device" and self.speed < 1000
        return f"{self.speed:.1f}" if is_small else format_count(self.speed)

    @property
    def number(self) -> str:
        """`value` as text, without its unit; `-` if there is no loss."""
        if self.goal != "loss":
            return self.speed_number
        return "-" if self.validation_loss is None else f"{self.validation_loss:.4f}"

    @property
    def outcome(self) -> str:
        """The status and, if the trial is not done, the words of its output with the reason."""
        lines = [line.strip() for line in self.reason.splitlines() if line.strip()]
        head = "configuration error at "
        words = [line.removeprefix(head) for line in lines if line.startswith((head, "got:"))]
        text = " ".join(" ".join(words or lines[-1:]).split()).replace("|", "/")
        reason = textwrap.shorten(text, 100, placeholder=" ...")
        return f"{self.status}: {reason}" if reason else self.status

    @classmethod
    def read(cls, folder: Path) -> "Trial":
        """Read the trial of a folder.

        Raises:
            DataError: the file is damaged.
        """
        path = folder / TRIAL_FILE
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise DataError(
                f"{path} is damaged: it does not contain a trial of a sweep\n"
                f"  do: remove {folder} and run that trial again"
            ) from None

    def write(self, folder: Path) -> None:
        """Write the trial's file atomically into a folder."""
        replace_text(folder / TRIAL_FILE, json.dumps(asdict(self), indent=1))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def read(sweep_dir: Path) -> list[Trial]:
    """Read all trials of a sweep, the best first, and of repeated settings the first.

    Raises:
        DataError: the file of a trial is damaged.
    """
    return [trial for _, trial in read_with_folders(sweep_dir)]


def read_with_folders(sweep_dir: Path) -> list[tuple[Path, Trial]]:
    """Do the same as `read`; return each trial with its folder."""
    settings: dict[frozenset[str], tuple[Path, Trial]] = {}
    for path in sorted(sweep_dir.rglob(TRIAL_FILE)):
        trial = Trial.read(path.parent)
        settings.setdefault(frozenset(trial.overrides), (path.parent, trial))
    return sorted(settings.values(), key=lambda found: (found[1].cost, found[1].status != "done"))


def read_in_order(sweep_dir: Path) -> list[Trial]:
    """Read the trials in the folders `0`, `1`, ... of a sweep, in this order."""
    folders = [path.parent for path in sweep_dir.glob(f"*/{TRIAL_FILE}")]
    numbered = [folder for folder in folders if folder.name.isdigit()]
    return [Trial.read(folder) for folder in sorted(numbered, key=lambda path: int(path.name))]


def ranks_by_chance(goal: str, keys: Iterable[str]) -> bool:
    """Return whether a search looks for speed along axes that have no influence on it."""
    names = list(keys)
    is_rate = [key.startswith("optimizer.") and key != "optimizer.name" for key in names]
    return goal != "loss" and bool(names) and all(is_rate)


def axes(trials: Sequence[Trial]) -> dict[str, list[str]]:
    """Return the keys with several values in a sweep, each with its values in order of the trials.

    A trial that does not set the key has the value `-`.
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


def random_influence(trials: Sequence[Trial]) -> float:
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
