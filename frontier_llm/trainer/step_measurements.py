"""Measures the first steps: phases and passes; counts the bytes of activations of each step."""

import time

import torch
import torch.distributed as dist

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.wire import ring_sent, unequal_sent
from frontier_llm.parallel.groups import Groups


class PassTimes:
    """The start and the end of every action of this rank's stage in one step of a pipeline.

    The report shows these times below those that the planner simulates. An action starts when its
    input has arrived and ends when its result is computed. On a GPU these are points in the current
    stream: they are read after the step, so that the host does not wait during the step. Nothing is
    recorded before `measure` and after `finish`, or without a pipeline. `seconds` then has the
    start and end of each action in the order of the schedule, in seconds since `measure`.
    """

    def __init__(self, stages: int) -> None:
        self._stages, self._is_on = stages, False
        self.seconds: list[tuple[float, float]] = []

    def measure(self, device: torch.device) -> None:
        """Record the next step, if there is a pipeline.

        Then collective over all ranks: the call returns when all ranks have called it, so that the
        times of all stages are seconds since the same moment.
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
        if isinstance(instant, torch.cuda.Event):
            return float(self._zero.elapsed_time(instant)) / 1000  # type: ignore[union-attr]
        return instant - self._zero  # type: ignore[operator]


_Instant = float | torch.cuda.Event
"""A time in seconds, or a point in a stream of a GPU."""


MEASURED_STEPS = 3
"""Number of measured steps; the first one is warm-up."""


class PhaseTimer:
    """A timer of the phases of the first steps, which are named by the caller.

    The plan check compares these times with the planner's prediction. Each measurement waits for
    the device, which slows training down, so later steps are not measured. `laps` has the seconds
    of each phase by measured step, `passes` the actions of a pipeline in the last one.
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


def count_activations(
    traffic: Traffic, groups: Groups, layout: ResolvedLayout, micro_batches: int
) -> None:
    """Count the bytes sent in the tensor group and to other stages, by formulas under test."""
    grid, rank, activations = groups.grid, groups.rank, layout.activation_traffic
    own_chunks = layout.chunks_of_stage(groups.coordinates.pipeline)
    # of one micro-batch
    tensor_bytes = sum(activations.tensor_bytes(chunk) for chunk in own_chunks)
    sent = activations.pipeline_sent(grid, rank, layout.model_chunks)
    tensor_ranks = grid.tensor_group(rank)
    traffic.add("tensor", ring_sent(grid, rank, tensor_ranks, tensor_bytes * micro_batches))
    traffic.add("pipeline", sent * micro_batches)
    if groups.context is not None:
        ranks = grid.context_group(rank)
        traffic.count(unequal_sent, "context", ranks, groups.context.take_sent())
