"""Measures the phases of a step in the first few steps of a run.

Measuring synchronises with the device, which costs time, so later steps are not measured.
"""

import time

import torch

MEASURED_STEPS = 3
"""Number of measured steps; the first one is warm-up."""


class PhaseTimer:
    """A timer of named phases.

    Attributes:
        laps: seconds by phase, one entry per measured step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last, self._done = 0.0, 0
        self.laps: list[dict[str, float]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all measured steps have ended."""
        return self._done == MEASURED_STEPS

    def begin(self) -> None:
        """Start measuring a step."""
        if not self.is_complete:
            self.laps.append({})
            self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Record the seconds since the last mark as the duration of a phase."""
        if self.is_complete or not self.laps:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.laps[-1][phase] = now - self._last
        self._last = now

    def end(self) -> None:
        """Stop measuring a step."""
        self._done = len(self.laps)

    def typical(self) -> dict[str, float]:
        """Return the shortest duration of each phase in seconds, without the first step."""
        laps = self.laps[1:]
        return {phase: min(lap[phase] for lap in laps) for phase in laps[-1]}
