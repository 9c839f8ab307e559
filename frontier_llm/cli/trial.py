"""Store the result of one trial of a sweep in a file.

`sweep` and `funnel` write these files; `sweep_report` and `funnel` read them.
"""

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from frontier_llm.config.launch import TrialValue
from frontier_llm.errors import DataError
from frontier_llm.units import format_count

TRIAL_FILE = "trial.json"

Status = Literal["done", "refused", "out of memory", "failed", "too slow"]
"""How a trial ended: "refused" if its configuration is invalid, "too slow" at its time limit."""

WORST_LOSS = 1e9
"""The loss that a search receives for a trial that is not done."""


@dataclass(frozen=True)
class Trial:
    """The result of one short run."""

    overrides: list[str]
    """The settings `key=value` of this trial."""
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
        partial = folder / f"{TRIAL_FILE}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(folder / TRIAL_FILE)
