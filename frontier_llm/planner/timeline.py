"""A step's passes one by one: when each stage computes which micro-batch.

Each stage makes the passes of `geometry/schedule.py` in their order; one starts when the stage is
free and the neighbour's pass that it waits for is over. (What passes cost includes the transfer.)
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from frontier_llm.geometry.schedule import stage_passes

Seconds = Sequence[tuple[float, float]]
"""Forward and backward seconds of one micro-batch, by stage, all its chunks together."""


class Event(NamedTuple):
    """One pass of one stage."""

    stage: int
    chunk: int
    micro_batch: int
    forward: bool
    start: float
    """Seconds from the beginning of the step."""
    end: float


_Key = tuple[int, int, bool]
"""Piece of the model, micro-batch, direction."""


def simulate(seconds: Seconds, chunks: int, micro_batches: int) -> list[Event]:
    """Follow all stages through one step.

    Args:
        seconds: of each stage.
        chunks: pieces a stage, each an equal part of its seconds.
        micro_batches: of a replica.

    Returns:
        Every pass, by stage in the order in which it makes them.
    """
    stages = len(seconds)
    waiting = [_passes(stage, stages, chunks, micro_batches) for stage in range(stages)]
    position, free = [0] * stages, [0.0] * stages
    ends: dict[_Key, float] = {}
    events: list[list[Event]] = [[] for _ in range(stages)]
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while position[stage] < len(waiting[stage]):
                chunk, micro_batch, forward = waiting[stage][position[stage]]
                ready = _ready(ends, stages, chunks, (chunk * stages + stage, micro_batch, forward))
                if ready is None:
                    break
                start = max(free[stage], ready)
                end = start + seconds[stage][0 if forward else 1] / chunks
                ends[chunk * stages + stage, micro_batch, forward] = free[stage] = end
                events[stage].append(Event(stage, chunk, micro_batch, forward, start, end))
                position[stage] += 1
                moved = True
    return [event for of_stage in events for event in of_stage]


def _passes(stage: int, stages: int, chunks: int, micro_batches: int) -> list[_Key]:
    """Number the passes of a stage: (chunk, micro-batch, direction)."""
    seen: Counter[tuple[int, bool]] = Counter()
    numbered = []
    for forward, chunk in stage_passes(stage, stages, chunks, micro_batches):
        numbered.append((chunk, seen[chunk, forward], forward))
        seen[chunk, forward] += 1
    return numbered


def _ready(ends: dict[_Key, float], stages: int, chunks: int, key: _Key) -> float | None:
    """Return when what a pass waits for is over; None = it has not been made yet."""
    piece, micro_batch, forward = key
    last = stages * chunks - 1
    if forward:
        return 0.0 if piece == 0 else ends.get((piece - 1, micro_batch, True))
    before = (piece, micro_batch, True) if piece == last else (piece + 1, micro_batch, False)
    return ends.get(before)
