"""Simulate the start and the end of every action of a step on every stage.

Each stage runs its list of actions (geometry/pipeline_schedule.py) in order. An action starts when
its stage is free and when the action that computes its input, usually on a neighbouring stage, has
ended. The seconds of an action include sending its result.
"""

from collections.abc import Callable
from typing import NamedTuple

from frontier_llm.geometry.pipeline_actions import Action, Kind
from frontier_llm.geometry.pipeline_schedule import Schedule

Cost = Callable[[Kind, int], float]
"""Returns the seconds of an action of a kind in a model chunk, given by its index in the model."""


class Event(NamedTuple):
    """One action of one stage."""

    stage: int
    action: Action
    start: float
    """Seconds since the start of the step."""
    end: float
    """Seconds since the start of the step."""


def simulate(schedule: Schedule, cost: Cost) -> list[Event]:
    """Simulate one step on all stages.

    Args:
        schedule: actions of all stages.
        cost: seconds of an action.

    Returns:
        Every action, by stage, in the order in which the stage runs them.
    """
    placement = schedule.placement
    stages = len(schedule.actions)
    free_at = [0.0] * stages
    ends: dict[tuple[bool, int, int], float] = {}  # by whether it is forward, chunk, micro-batch
    events: list[list[Event]] = [[] for _ in range(stages)]
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for stage, actions in enumerate(schedule.actions):
            while len(events[stage]) < len(actions):
                action = actions[len(events[stage])]
                kind, virtual_stage, micro_batch = action
                chunk, is_forward = placement.chunk(stage, virtual_stage), kind == "forward"
                # weight gradients follow input gradients of their own stage
                needs_input = kind != "weight_gradients"
                source = placement.source(chunk, is_forward=is_forward) if needs_input else None
                ready = 0.0 if source is None else ends.get((*source, micro_batch))
                if ready is None:
                    break
                start = max(free_at[stage], ready)
                end = free_at[stage] = start + cost(kind, chunk)
                if needs_input:
                    ends[is_forward, chunk, micro_batch] = end
                events[stage].append(Event(stage, action, start, end))
                has_progressed = True
    return [event for stage_events in events for event in stage_events]
