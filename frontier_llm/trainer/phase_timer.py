"""Measures how long each phase of a step takes, in the first few steps of a run.

The plan check compares these times with the planner's prediction. Each measurement waits for the
device, which slows training down, so later steps are not measured.
"""

import time

import torch

from frontier_llm.trainer.pass_times import PassTimes

MEASURED_STEPS = 3
"""Number of measured steps; the first one is warm-up."""


class PhaseTimer:
    """A timer of the phases of a step, which are named by the caller.

    Attributes:
        laps: for each measured step, the seconds of each phase.
        passes: start and end of the actions of a pipeline in the last measured step.
    """

    def __init__(self, device: torch.device, passes: PassTimes) -> None:
        self._device, self.passes = device, passes
        self._last, self._ended = 0.0, 0
        self.laps: list[dict[str, float]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all measured steps have ended."""
        return self._ended == MEASURED_STEPS

    def begin(self) -> None:
        """Start measuring a step. Before the last one, all ranks wait for each other."""
        if self._ended == MEASURED_STEPS - 1:
            self.passes.measure(self._device)
        if not self.is_complete:
            self.laps.append({})
            self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Record the seconds since the last mark, or since `begin`, as the duration of a phase."""
        if self.is_complete or not self.laps:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.laps[-1][phase] = now - self._last
        self._last = now

    def end(self) -> None:
        """Stop measuring a step."""
        self._ended = len(self.laps)
        self.passes.finish()

    def typical(self) -> dict[str, float]:
        """Return the shortest duration of each phase in seconds, ignoring the warm-up step."""
        laps = self.laps[1:]
        return {phase: min(lap[phase] for lap in laps) for phase in laps[-1]}
