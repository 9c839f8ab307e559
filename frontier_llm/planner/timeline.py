"""Simulate the start and the end of every pass of a step on every stage.

A pass is the forward or backward computation of one micro-batch in one model chunk. Each stage
computes its passes in the order of `geometry/pipeline_schedule.py`. A pass starts when its stage is
free and when the pass that computes its input, usually on a neighbouring stage, has ended. The
seconds of a pass include sending its result.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from frontier_llm.geometry.pipeline_schedule import stage_passes

Seconds = Sequence[tuple[float, float]]
"""For each stage, the forward and backward seconds of one micro-batch in all its model chunks."""


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


_PassKey = tuple[int, int, bool]
"""A pass: index of its model chunk in the model, its micro-batch, and whether it is forward."""


def simulate(seconds: Seconds, virtual_stages: int, micro_batches: int) -> list[Event]:
    """Simulate one step on all stages.

    Args:
        seconds: forward and backward seconds of one micro-batch on each stage.
        virtual_stages: model chunks per stage, each of which takes an equal share of the seconds.
        micro_batches: micro-batches per replica.

    Returns:
        Every pass, by stage, in the order in which the stage computes them.
    """
    stages = len(seconds)
    passes = [_passes(stage, stages, virtual_stages, micro_batches) for stage in range(stages)]
    last = stages * virtual_stages - 1
    next_pass, free_at = [0] * stages, [0.0] * stages
    ends: dict[_PassKey, float] = {}
    events: list[list[Event]] = [[] for _ in range(stages)]
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for stage in range(stages):
            while next_pass[stage] < len(passes[stage]):
                virtual_stage, micro_batch, forward = passes[stage][next_pass[stage]]
                key = (virtual_stage * stages + stage, micro_batch, forward)
                ready = _ready(ends, last, key)
                if ready is None:
                    break
                start = max(free_at[stage], ready)
                end = start + seconds[stage][0 if forward else 1] / virtual_stages
                ends[key] = free_at[stage] = end
                events[stage].append(Event(stage, virtual_stage, micro_batch, forward, start, end))
                next_pass[stage] += 1
                has_progressed = True
    return [event for stage_events in events for event in stage_events]


def _passes(
    stage: int, stages: int, virtual_stages: int, micro_batches: int
) -> list[tuple[int, int, bool]]:
    """Return the passes of a stage in order: virtual stage, micro-batch, whether it is forward."""
    # the n-th forward pass of a virtual stage computes micro-batch n, and so does the n-th backward
    next_micro_batch: Counter[tuple[int, bool]] = Counter()
    passes = []
    for forward, virtual_stage in stage_passes(stage, stages, virtual_stages, micro_batches):
        passes.append((virtual_stage, next_micro_batch[virtual_stage, forward], forward))
        next_micro_batch[virtual_stage, forward] += 1
    return passes


def _ready(ends: dict[_PassKey, float], last: int, key: _PassKey) -> float | None:
    """Return when the input of a pass is ready; None = the pass that computes it has not ended.

    Args:
        ends: end of each pass that was simulated so far.
        last: index of the last model chunk of the model.
        key: the pass whose input is needed.
    """
    chunk, micro_batch, forward = key
    if forward:
        return 0.0 if chunk == 0 else ends.get((chunk - 1, micro_batch, True))
    # the backward pass of the last chunk follows its own forward pass
    source = (chunk, micro_batch, True) if chunk == last else (chunk + 1, micro_batch, False)
    return ends.get(source)
