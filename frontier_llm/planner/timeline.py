"""Start and end of every pass of a step on every stage.

Each stage computes the passes of `geometry/pipeline_schedule.py` in order. A pass starts when the
stage is free and the neighbouring stage's pass on which it depends has ended. The seconds of a pass
include sending its result.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from frontier_llm.geometry.pipeline_schedule import stage_passes

Seconds = Sequence[tuple[float, float]]
"""Forward and backward seconds of one micro-batch by stage, all its model chunks together."""


class Event(NamedTuple):
    """One pass of one stage."""

    stage: int
    virtual_stage: int
    micro_batch: int
    forward: bool
    start: float
    """Seconds since the start of the step."""
    end: float
    """Seconds since the start of the step."""


_Key = tuple[int, int, bool]
"""Index of a model chunk, micro-batch, whether the pass is forward."""


def simulate(seconds: Seconds, virtual_stages: int, micro_batches: int) -> list[Event]:
    """Simulate one step on all stages.

    Args:
        seconds: of each stage.
        virtual_stages: model chunks per stage, which share its seconds equally.
        micro_batches: of a replica.

    Returns:
        Every pass, by stage, in the order in which the stage computes them.
    """
    stages = len(seconds)
    waiting = [_passes(stage, stages, virtual_stages, micro_batches) for stage in range(stages)]
    last = stages * virtual_stages - 1
    position, free = [0] * stages, [0.0] * stages
    ends: dict[_Key, float] = {}
    events: list[list[Event]] = [[] for _ in range(stages)]
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while position[stage] < len(waiting[stage]):
                virtual_stage, micro_batch, forward = waiting[stage][position[stage]]
                key = (virtual_stage * stages + stage, micro_batch, forward)
                ready = _ready(ends, last, key)
                if ready is None:
                    break
                start = max(free[stage], ready)
                end = start + seconds[stage][0 if forward else 1] / virtual_stages
                ends[key] = free[stage] = end
                events[stage].append(Event(stage, virtual_stage, micro_batch, forward, start, end))
                position[stage] += 1
                moved = True
    return [event for of_stage in events for event in of_stage]


def _passes(
    stage: int, stages: int, virtual_stages: int, micro_batches: int
) -> list[tuple[int, int, bool]]:
    """Return a stage's passes in order: virtual stage, micro-batch, whether it is forward."""
    seen: Counter[tuple[int, bool]] = Counter()
    numbered = []
    for forward, virtual_stage in stage_passes(stage, stages, virtual_stages, micro_batches):
        numbered.append((virtual_stage, seen[virtual_stage, forward], forward))
        seen[virtual_stage, forward] += 1
    return numbered


def _ready(ends: dict[_Key, float], last: int, key: _Key) -> float | None:
    """Return the end of the pass on which a pass depends; None = it has not been computed yet.

    Args:
        ends: of the passes computed so far.
        last: index of the last model chunk.
        key: the pass.
    """
    chunk, micro_batch, forward = key
    if forward:
        return 0.0 if chunk == 0 else ends.get((chunk - 1, micro_batch, True))
    before = (chunk, micro_batch, True) if chunk == last else (chunk + 1, micro_batch, False)
    return ends.get(before)
