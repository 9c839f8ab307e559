"""Time limits of the phases of a run, as the watchdog reads them."""

from collections.abc import Collection
from statistics import median
from typing import Protocol

_MEASURED_STEPS = 3
"""Until this many steps have been measured, each step has the time limit of a first step."""


class Limits(Protocol):
    """Time limits of phases in seconds. The section `watchdog` of a configuration has them."""

    @property
    def enabled(self) -> bool:
        """Whether the limits are enforced."""

    @property
    def startup_seconds(self) -> float:
        """Limit from the start of a rank to its first step."""

    @property
    def first_step_seconds(self) -> float:
        """Limit of each of the first three steps."""

    @property
    def step_seconds(self) -> float:
        """Least limit of a later step."""

    @property
    def step_factor(self) -> float:
        """Multiple of the median step time that a step may take."""

    @property
    def checkpoint_seconds(self) -> float:
        """Limit of the time during which training waits for a checkpoint."""

    @property
    def evaluation_seconds(self) -> float:
        """Limit of an evaluation."""


def limit_of(name: str, limits: Limits, step_seconds: Collection[float]) -> float:
    """Return the time limit of a phase in seconds.

    Phases other than `step`, `checkpoint` and `evaluation` have the limit of the start-up.
    """
    if name == "step":
        if len(step_seconds) < _MEASURED_STEPS:
            return limits.first_step_seconds
        return max(limits.step_seconds, limits.step_factor * median(step_seconds))
    of_phases = {"checkpoint": limits.checkpoint_seconds, "evaluation": limits.evaluation_seconds}
    return of_phases.get(name, limits.startup_seconds)
