"""Seconds of the phases of a step, measured in the first few steps of a run.

Only there: to know when a phase ends, the device must have finished it.
"""

import time

import torch

MEASURED_STEPS = 3
"""Steps that are measured; the first of them warms up."""


class PhaseTimer:
    """A stopwatch with named laps.

    Attributes:
        laps: seconds by phase, of each step measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last, self._done = 0.0, 0
        self.laps: list[dict[str, float]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all steps that are measured are over."""
        return self._done == MEASURED_STEPS

    def begin(self) -> None:
        """Begin a step."""
        if not self.is_complete:
            self.laps.append({})
            self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End a phase of the step."""
        if self.is_complete or not self.laps:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.laps[-1][phase] = now - self._last
        self._last = now

    def end(self) -> None:
        """End a step."""
        self._done = len(self.laps)

    def typical(self) -> dict[str, float]:
        """Return the shortest seconds of each phase, without the first step's."""
        settled = self.laps[1:]
        return {phase: min(lap[phase] for lap in settled) for phase in settled[-1]}
