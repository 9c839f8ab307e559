"""Simulate the start and the end of every action of a step on every stage.

Each stage runs its list of actions (geometry/pipeline_schedule.py) in order. An action starts when
its stage is free and when the action that computes its input has ended. If the input comes from
another stage, the sender is occupied for a part of the sending time, and the input arrives later.

In a long step, most time is spent in a steady state, in which the slowest stage never waits. So a
step is simulated with fewer micro-batches, and each of the others is counted as the seconds of the
slowest stage.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from frontier_llm.geometry.pipeline_schedule import Action, Event, Placement, Schedule, run_stages
from frontier_llm.geometry.resolved import ResolvedLayout

SIMULATED = 3
"""Micro-batches that are simulated in a long step, as a multiple of the stages. A multiple of the
stages is left out, so that the groups of micro-batches of interleaved schedules stay similar."""
ROUNDING = 1e-9
"""Share by which a lower bound is lowered, more than the rounding errors of all sums."""
Times = list[list[tuple[float, float]]]
"""For each stage, the start and the end of its actions, in their order."""
_Results = dict[tuple[bool, int] | None, list[float | None]]
"""By whether a pass is forward and by its chunk: when its result has arrived where it is read, by
micro-batch; None = not yet known."""
_Cost = tuple[float, float, list[float | None], list[float | None]]
"""Seconds of an action, further seconds until its result arrives, when the results that it needs
arrive, and when its own results arrive."""


class ActionSeconds(NamedTuple):
    """Seconds of each `Kind` of action for one micro-batch in one model chunk, without sends."""

    forward: float
    backward: float
    input_gradients: float
    weight_gradients: float

    def plus(self, other: "ActionSeconds") -> "ActionSeconds":
        """Return the sums of the seconds of equal actions."""
        return ActionSeconds(*map(operator.add, self, other))

    def total(self, *, splits: bool) -> float:
        """Return the seconds of all actions of a micro-batch, whose gradients may be split."""
        split = self.input_gradients + self.weight_gradients
        return self.forward + (split if splits else self.backward)


class Send(NamedTuple):
    """Seconds of sending an activation or its gradient to another stage."""

    occupied: float = 0.0
    """Seconds for which the stage that sends cannot compute."""
    hidden: float = 0.0
    """Further seconds until the tensor arrives, during which the stage computes."""


NO_SEND = Send()


def simulate(
    schedule: Schedule, seconds: Sequence[Sequence[ActionSeconds]], send: Send = NO_SEND
) -> list[Event]:
    """Simulate one step on all stages; return every action, by stage, in its order there.

    `seconds` has the seconds of an action for each stage and each of its virtual stages.
    """
    times = action_times(schedule, seconds, send)
    return [
        Event(stage, action, start, end)
        for stage, actions in enumerate(schedule.actions)
        for action, (start, end) in zip(actions, times[stage], strict=True)
    ]


def pass_seconds(
    layout: ResolvedLayout, seconds: Sequence[Sequence[ActionSeconds]], send: Send
) -> float:
    """Return the seconds from the first to the last action of a step; arguments as for `simulate`.

    At most a few micro-batches per stage are simulated.
    """
    short = shortened(layout)
    of_stages = _moments(short.schedule, seconds, send)
    busy = max(sum(moments[1::2]) - sum(moments[::2]) for moments in of_stages)
    left_out = layout.micro_batches - short.micro_batches
    last = max(moments[-1] for moments in of_stages)
    return last + left_out * busy / short.micro_batches


def shortened(layout: ResolvedLayout) -> ResolvedLayout:
    """Return a layout with fewer micro-batches, but with the same steady state and peak memory."""
    stages = layout.grid.pipeline
    whole, rest = divmod(layout.micro_batches, stages)
    kept = SIMULATED
    if layout.schedule_name == "interleaved" and whole >= rest:
        # `rest` groups have one micro-batch more than the others, and both sizes are simulated
        kept = max(kept, rest + 2)
    return replace(layout, micro_batches=min(whole, kept) * stages + rest)


def action_times(
    schedule: Schedule, seconds: Sequence[Sequence[ActionSeconds]], send: Send
) -> Times:
    """Return the start and the end of every action. The arguments are those of `simulate`."""
    of_stages = _moments(schedule, seconds, send)
    return [list(zip(moments[::2], moments[1::2], strict=True)) for moments in of_stages]


def _moments(
    schedule: Schedule, seconds: Sequence[Sequence[ActionSeconds]], send: Send
) -> list[list[float]]:
    """Return for each stage the start and the end of its actions, one after the other."""
    placement = schedule.placement
    micro_batches = 1 + max(action.micro_batch for action in schedule.actions[0])
    results: _Results = {
        (is_forward, chunk): [None] * micro_batches
        for is_forward in (True, False)
        for chunk in range(placement.chunks)
    }
    results[None] = [0.0] * micro_batches  # what an action needs that needs no other action
    moments: list[list[float]] = [[] for _ in schedule.actions]
    run_stages(
        [
            _run(actions, _costs(placement, stage, seconds[stage], send, results), moments[stage])
            for stage, actions in enumerate(schedule.actions)
        ]
    )
    return moments


def _run(
    actions: Sequence[Action], costs: Mapping[str, Sequence[_Cost]], moments: list[float]
) -> Iterator[int]:
    """Append the start and the end of each action, and yield where a result is not yet known."""
    free = 0.0
    for kind, virtual_stage, micro_batch in actions:
        duration, delay, needed, result = costs[kind][virtual_stage]
        while (arrival := needed[micro_batch]) is None:
            yield len(moments)
        start = arrival if arrival > free else free
        free = start + duration
        moments.append(start)
        moments.append(free)
        result[micro_batch] = free + delay


def _costs(
    placement: Placement,
    stage: int,
    seconds: Sequence[ActionSeconds],
    send: Send,
    results: _Results,
) -> dict[str, list[_Cost]]:
    """Return the costs of the actions of a stage, by kind and virtual stage."""
    costs: dict[str, list[_Cost]] = {kind: [] for kind in ActionSeconds._fields}
    for virtual_stage, chunk_seconds in enumerate(seconds):
        chunk = placement.chunk(stage, virtual_stage)
        for kind, duration in chunk_seconds._asdict().items():
            is_forward = kind == "forward"
            reader = chunk + 1 if is_forward else chunk - 1
            is_sent = 0 <= reader < placement.chunks and placement.stage(reader) != stage
            sent = send if is_sent else NO_SEND
            needed = results[placement.source(chunk, is_forward=is_forward)]
            result = results[is_forward, chunk]
            if kind == "weight_gradients":  # they follow the input gradients of their own stage
                sent, needed, result = NO_SEND, results[None], results[None].copy()
            costs[kind].append((duration + sent.occupied, sent.hidden, needed, result))
    return costs


def least_pass_seconds(layout: ResolvedLayout, seconds: Sequence[Sequence[ActionSeconds]]) -> float:
    """Return a lower bound on `pass_seconds` that needs no list of actions.

    Before a stage can start, the first micro-batch passes all chunks before the stage's first one.
    Then the stage has to do its own work for all micro-batches. Its last input gradients are those
    of its first chunk. After them it has at most `waiting_weights` weight gradients left, and the
    gradients of the last micro-batch still pass all earlier stages.
    """
    placement, now = layout.placement, 0.0
    starts: dict[int, float] = {}
    busy, last = [0.0] * placement.stages, 0.0
    for chunk in range(placement.chunks):
        stage = placement.stage(chunk)
        actions = seconds[stage][placement.virtual_stage(chunk)]
        starts.setdefault(stage, now)
        now += actions.forward
        work = actions.total(splits=True)
        if chunk == 0 or placement.stage(chunk - 1) == stage:  # may be a whole backward pass
            work = min(work, actions.total(splits=False))
        busy[stage] += work
        if chunk == 0:
            last = work - actions.forward
    least = passed = 0.0
    for stage, of_stage in enumerate(seconds):
        left = max(actions.weight_gradients for actions in of_stage)
        left *= layout.waiting_weights or math.inf
        after = max(0.0, passed - left)
        least = max(least, starts[stage] + layout.micro_batches * busy[stage] + after)
        passed += of_stage[0].input_gradients if stage else last
    return least * (1 - ROUNDING)
