"""Split backward passes, and compute weight gradients where a stage would wait."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from frontier_llm.geometry.pipeline_actions import Action, ActionLists, Placement


def defer(
    placement: Placement, lists: Sequence[Sequence[Action]], limit: int, input_cost: int
) -> ActionLists:
    """Split the backward passes of a schedule, and compute weight gradients in its gaps.

    Gaps follow from nominal costs: forward passes and weight gradients cost 1. A gap is then a
    whole number, so that the weight gradients in it delay nothing. Weight gradients do not wait for
    a gap where more than `limit` would wait, or where a stage would hold more passes for later than
    the fullest stage of the given lists. From 1F1B this makes ZB-H1 (Qi et al., arXiv:2401.10241,
    section 2.3), in which the last stages hold as much as the first one.

    Args:
        placement: placement of the model chunks.
        lists: for each stage, its forward and backward passes in order.
        limit: how many weight gradients of a stage may wait, at least 1.
        input_cost: nominal cost of input gradients; 2 if they recompute the forward pass.
    """
    capacity = max(
        max(accumulate(1 if action.kind == "forward" else -1 for action in actions))
        for actions in lists
    )
    stages = [_Stage(placement, stage, limit, capacity) for stage in range(placement.stages)]
    links = _links(placement, len(lists[0]) // (2 * placement.virtual_stages))
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for state, actions, linked in zip(stages, lists, links, strict=True):
            for action in actions[state.passes :]:
                kind, virtual_stage, micro_batch = action
                needed, ends, is_forward = linked[kind][virtual_stage]
                ready = needed[micro_batch] if needed is not None else 0
                if ready is None:
                    break
                ends[micro_batch] = state.add(action, ready, is_forward, input_cost)
                has_progressed = True
    return [state.finish() for state in stages]


_Ends = list[int | None]
"""When the passes of a chunk end, by micro-batch; None = not yet known."""


class _Link(NamedTuple):
    """The ends of the passes of which a pass needs the results, and of the pass itself."""

    needed: _Ends | None
    ends: _Ends
    is_forward: bool


def _links(placement: Placement, micro_batches: int) -> list[dict[str, list[_Link]]]:
    """Return the links of all stages, by kind and virtual stage."""
    ends: dict[tuple[bool, int], _Ends] = {
        (is_forward, chunk): [None] * micro_batches
        for is_forward in (True, False)
        for chunk in range(placement.chunks)
    }

    def link(chunk: int, is_forward: bool) -> _Link:
        source = placement.source(chunk, is_forward=is_forward)
        needed = None if source is None else ends[source]
        return _Link(needed, ends[is_forward, chunk], is_forward)

    return [
        {
            kind: [
                link(placement.chunk(stage, virtual_stage), is_forward)
                for virtual_stage in range(placement.virtual_stages)
            ]
            for kind, is_forward in (("forward", True), ("backward", False))
        }
        for stage in range(placement.stages)
    ]


class _Stage:
    """The actions of one stage up to a moment, which is given in nominal costs."""

    def __init__(self, placement: Placement, stage: int, limit: int, capacity: int) -> None:
        self.passes = 0
        """Forward and backward passes that were added."""
        self._order: list[Action] = []
        # weight gradients that wait, each with the input gradients of the same pass
        self._waiting: deque[tuple[Action, Action]] = deque()
        self._limit, self._capacity = limit, capacity
        self._now = self._held = 0
        chunks = [placement.chunk(stage, index) for index in range(placement.virtual_stages)]
        # by virtual stage: whether another stage waits for its input gradients
        self._sends = [chunk > 0 and placement.stage(chunk - 1) != stage for chunk in chunks]

    def add(self, action: Action, ready: int, is_forward: bool, input_cost: int) -> int:
        """Add a pass whose input is ready at a moment, and return when the pass ends."""
        while self._waiting and (
            self._now < ready or (is_forward and self._held == self._capacity)
        ):
            self._add_weight_gradients()
        end = (ready if ready > self._now else self._now) + (1 if is_forward else input_cost)
        self._now = end
        self.passes += 1
        if is_forward:
            self._held += 1
            self._order.append(action)
        else:
            _, virtual_stage, micro_batch = action
            inputs = Action("input_gradients", virtual_stage, micro_batch)
            self._order.append(inputs)
            self._waiting.append((Action("weight_gradients", virtual_stage, micro_batch), inputs))
            if len(self._waiting) == self._limit:
                self._add_weight_gradients()
        return end

    def finish(self) -> list[Action]:
        """Add what waits, and return all actions."""
        while self._waiting:
            self._add_weight_gradients()
        return self._order

    def _add_weight_gradients(self) -> None:
        action, inputs = self._waiting.popleft()
        # Together the two are faster. But the input gradients would be sent later.
        if self._order[-1] is inputs and not self._sends[action.virtual_stage]:
            self._order[-1] = action._replace(kind="backward")
        else:
            self._order.append(action)
        self._now += 1
        self._held -= 1
