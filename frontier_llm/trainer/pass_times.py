"""Measures when this rank's stage computes each action of a pipeline schedule, in one step.

The report shows these times below those that the planner simulates. An action starts when its input
has arrived and ends when its result is computed. On a GPU these are points in the current stream:
they are read after the step, so that the host does not wait during the step.
"""

import time

import torch
import torch.distributed as dist


class PassTimes:
    """The start and the end of every action of one step.

    Nothing is recorded before `measure` and after `finish`, or without a pipeline.

    Attributes:
        seconds: start and end of each action in the order of the schedule, in seconds since
            `measure`; empty until `finish`.
    """

    def __init__(self, stages: int) -> None:
        """Initialise.

        Args:
            stages: number of pipeline stages.
        """
        self._stages, self._is_on = stages, False
        self.seconds: list[tuple[float, float]] = []

    def measure(self, device: torch.device) -> None:
        """Record the next step, if there is a pipeline.

        Then collective over all ranks: the call returns when all ranks have called it, so that the
        times of all stages are seconds since the same moment.

        Args:
            device: the device that computes the actions.
        """
        if self._stages == 1:
            return
        together = torch.zeros(1, device=device)
        dist.all_reduce(together)
        together.item()  # waits for the device
        self._device, self._is_on = device, True
        self._zero = self._start = self._now()
        self._instants: list[tuple[_Instant, _Instant]] = []

    def start(self) -> None:
        """Record that the next action starts. Only the last call before its end counts."""
        if self._is_on:
            self._start = self._now()

    def end(self) -> None:
        """Record that an action ends."""
        if self._is_on:
            self._instants.append((self._start, self._now()))

    def finish(self) -> None:
        """End the measured step; on a GPU, wait for it."""
        if not self._is_on:
            return
        self._is_on = False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds = [(self._since(start), self._since(end)) for start, end in self._instants]
        self._instants.clear()

    def _now(self) -> "_Instant":
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, instant: "_Instant") -> float:
        """Return the seconds from `measure` to an instant."""
        if isinstance(instant, torch.cuda.Event):
            return float(self._zero.elapsed_time(instant)) / 1000  # type: ignore[union-attr]
        return instant - self._zero  # type: ignore[operator]


_Instant = float | torch.cuda.Event
"""A time in seconds, or a point in a stream of a GPU."""
