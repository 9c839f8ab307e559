"""The phases of a run of checkpoint_in_training.py: their steps, and how often these are saved."""

from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP_STEPS = 4
"""Steps of the first phase. The first two are saved; the other two change the states, before the
checkpoint of the second step is compared with a copy."""


@dataclass(frozen=True)
class Phase:
    """Consecutive steps with one interval between saves."""

    steps: int
    every: int
    """Steps from one save to the next; 0: no saves."""

    def is_due(self, number: int) -> bool:
        """Return whether step `number` of the phase, counted from 1, is saved: 1, 1 + every, ..."""
        return self.every > 0 and (number - 1) % self.every == 0

    @property
    def saves(self) -> int:
        """Number of saves."""
        return self.steps // self.every if self.every else 0


@dataclass(frozen=True)
class Schedule:
    """A run: a warm-up, phases that are measured, and a last step that is not."""

    phases: tuple[Phase, ...]

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return WARM_UP_STEPS + sum(phase.steps for phase in self.phases) + 1

    def place(self, step: int) -> tuple[int | None, int]:
        """Return the index of a step's phase and the number of the step in it, counted from 1.

        The index is None in the warm-up, whose steps have the numbers 1 to WARM_UP_STEPS, and after
        the last phase, where the number is 0.
        """
        if step <= WARM_UP_STEPS:
            return None, step
        number = step - WARM_UP_STEPS
        for index, phase in enumerate(self.phases):
            if number <= phase.steps:
                return index, number
            number -= phase.steps
        return None, 0


def schedule_of(intervals: Sequence[int], steps: int, plain_steps: int) -> Schedule:
    """Return a run whose first phase has no saves, and which then has a phase per interval.

    Args:
        intervals: steps from one save to the next, by phase.
        steps: least number of steps of a phase with saves; a phase has whole intervals.
        plain_steps: number of steps without saves.
    """
    saved = (Phase(-(-steps // every) * every, every) for every in intervals)
    return Schedule((Phase(plain_steps, 0), *saved))
