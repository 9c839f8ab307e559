"""Time limits of the phases of a run, as the watchdog reads them."""

from typing import Protocol


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
