"""Split backward passes, and compute weight gradients where a stage would wait."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from frontier_llm.geometry.pipeline_actions import (
    Action,
    ActionLists,
    Kind,
    Placement,
    actions_of,
    run_stages,
)


def defer(
    placement: Placement,
    lists: Sequence[Sequence[Action]],
    capacity: int,
    limit: int,
    input_cost: int,
) -> ActionLists:
    """Split the backward passes of a schedule, and compute weight gradients in its gaps.

    Gaps follow from nominal costs: forward passes and weight gradients cost 1. A gap is then a
    whole number, so that the weight gradients in it delay nothing. Weight gradients do not wait for
    a gap where more than `limit` would wait, or where a stage would hold more passes for later than
    `capacity`. From 1F1B this makes ZB-H1 (Qi et al., arXiv:2401.10241,
    section 2.3), in which the last stages hold as much as the first one.

    Args:
        placement: placement of the model chunks.
        lists: for each stage, its forward and backward passes in order.
        capacity: how many passes the fullest stage of the lists holds for later.
        limit: how many weight gradients of a stage may wait, at least 1.
        input_cost: nominal cost of input gradients; 2 if they recompute the forward pass.
    """
    micro_batches = len(lists[0]) // (2 * placement.virtual_stages)
    split = _SplitPasses.of(placement.virtual_stages, micro_batches)
    stages = [_Stage(placement, stage, limit, capacity, split) for stage in range(placement.stages)]
    links = _links(placement, micro_batches)
    run_stages(
        [
            stage.add_passes(actions, linked, input_cost)
            for stage, actions, linked in zip(stages, lists, links, strict=True)
        ]
    )
    return [stage.order for stage in stages]


_Ends = list[int | None]
"""When the passes of a chunk end, by micro-batch; None = not yet known."""


class _Link(NamedTuple):
    """The ends of the passes of which a pass needs the results, and of the pass itself."""

    needed: _Ends
    ends: _Ends
    is_forward: bool


def _links(placement: Placement, micro_batches: int) -> list[dict[str, list[_Link]]]:
    """Return the links of all stages, by kind and virtual stage."""
    ends: dict[tuple[bool, int], _Ends] = {
        (is_forward, chunk): [None] * micro_batches
        for is_forward in (True, False)
        for chunk in range(placement.chunks)
    }

    at_once: _Ends = [0] * micro_batches

    def link(chunk: int, is_forward: bool) -> _Link:
        source = placement.source(chunk, is_forward=is_forward)
        needed = at_once if source is None else ends[source]
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


class _SplitPasses(NamedTuple):
    """The actions of backward passes by virtual stage and micro-batch, which all stages share."""

    whole: ActionLists
    inputs: ActionLists
    weights: ActionLists

    @classmethod
    def of(cls, virtual_stages: int, micro_batches: int) -> "_SplitPasses":
        kinds: tuple[Kind, ...] = ("backward", "input_gradients", "weight_gradients")
        return cls(*(actions_of(kind, virtual_stages, micro_batches) for kind in kinds))


class _Stage:
    """The actions of one stage."""

    def __init__(
        self, placement: Placement, stage: int, limit: int, capacity: int, split: _SplitPasses
    ) -> None:
        self.order: list[Action] = []
        """The actions, with split backward passes."""
        # weight gradients that wait: virtual stage and micro-batch
        self._waiting: deque[tuple[int, int]] = deque()
        self._limit, self._capacity, self._split = limit, capacity, split
        chunks = [placement.chunk(stage, index) for index in range(placement.virtual_stages)]
        # by virtual stage: whether another stage waits for its input gradients
        self._sends = [chunk > 0 and placement.stage(chunk - 1) != stage for chunk in chunks]

    def add_passes(
        self, actions: Sequence[Action], linked: dict[str, list[_Link]], input_cost: int
    ) -> Iterator[int]:
        """Add passes in order, and yield where the input of a pass is not yet known.

        Args:
            actions: the forward and backward passes.
            linked: the links of the passes, by kind and virtual stage.
            input_cost: nominal cost of input gradients.
        """
        now = held = 0  # a search runs this loop a million times, so it uses local variables
        order, waiting, add_weight_gradients = self.order, self._waiting, self._add_weight_gradients
        limit, capacity, inputs = self._limit, self._capacity, self._split.inputs
        for action in actions:
            kind, virtual_stage, micro_batch = action
            needed, ends, is_forward = linked[kind][virtual_stage]
            while (ready := needed[micro_batch]) is None:
                yield len(order)
            while waiting and (now < ready or (is_forward and held == capacity)):
                add_weight_gradients()
                now += 1
                held -= 1
            if ready > now:
                now = ready
            if is_forward:
                order.append(action)
                held += 1
                now += 1
                ends[micro_batch] = now
                continue
            order.append(inputs[virtual_stage][micro_batch])
            waiting.append((virtual_stage, micro_batch))
            now += input_cost
            ends[micro_batch] = now
            if len(waiting) == limit:
                add_weight_gradients()
                now += 1
                held -= 1
        while waiting:
            add_weight_gradients()

    def _add_weight_gradients(self) -> None:
        virtual_stage, micro_batch = self._waiting.popleft()
        # Together the two are faster. But the input gradients would be sent later.
        is_last = self.order[-1] is self._split.inputs[virtual_stage][micro_batch]
        if is_last and not self._sends[virtual_stage]:
            self.order[-1] = self._split.whole[virtual_stage][micro_batch]
        else:
            self.order.append(self._split.weights[virtual_stage][micro_batch])
