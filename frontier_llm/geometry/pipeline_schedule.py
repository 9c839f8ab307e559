"""Pipeline schedules as data: for each stage, a list of its actions in one step, in order.

The executor (trainer/pipeline.py) runs these lists and the planner simulates them. All ranks make
the same lists, because the lists are functions of a few integers.

An action is a computation of one micro-batch in one model chunk (consecutive layers). The gradients
of a chunk are either computed by one action, `backward`, or by two: `input_gradients`, for which
the previous stage waits, and later `weight_gradients`, for which no stage waits (Qi et al.,
arXiv:2401.10241, where the actions are called F, B and W). A schedule is an order of forward and
backward passes, whose backward passes may then be split (`defer`). There are three orders:

- 1F1B: a stage starts with forward passes (warm-up), continues with pairs of one forward and one
  backward pass, and ends with backward passes (cool-down; Narayanan et al., SC'21, section 2.2.1).
- Interleaved 1F1B (section 2.2.2) has the same phases, but each stage has several model chunks. A
  group of micro-batches passes the first chunk of a stage, then the second one, and so on.
- V placement with two chunks per stage (Qi et al., arXiv:2401.10241, section 6): each pass of
  micro-batch i + 1 comes a fixed time after that of micro-batch i, which makes time for all the
  work of one micro-batch (Qi et al., arXiv:2405.15362).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

from frontier_llm.config.parallel import ScheduleName

Kind = Literal["forward", "backward", "input_gradients", "weight_gradients"]
FOLDED = ("zb_v", "v_half")
"""Schedules with V placement."""
SPLIT_KINDS: tuple[Kind, ...] = ("backward", "input_gradients", "weight_gradients")
_Ends = dict[tuple[bool, int] | None, list[int | None]]
"""By whether a pass is forward and by its chunk: when it ends, by micro-batch; None = unknown."""


class Action(NamedTuple):
    """A computation of one micro-batch in one model chunk of a stage."""

    kind: Kind
    virtual_stage: int
    """Index of the model chunk on its stage."""
    micro_batch: int


class Event(NamedTuple):
    """One action of one stage, measured or simulated."""

    stage: int
    action: Action
    start: float
    """Seconds since the start of the step."""
    end: float
    """Seconds since the start of the step."""


@dataclass(frozen=True)
class Placement:
    """On which stage each model chunk is.

    Chunks are numbered in the order of the forward pass, and so are the virtual stages of a stage.
    """

    stages: int
    virtual_stages: int = 1
    """Model chunks per stage."""
    folded: bool = False
    """False: the first stage follows the last one (Narayanan et al., SC'21, section 2.2). True: the
    chunks go forth and back (V placement, arXiv:2401.10241, section 6), so that with two virtual
    stages the first stage has the first and the last chunk."""

    @property
    def chunks(self) -> int:
        """Number of model chunks of the whole pipeline."""
        return self.stages * self.virtual_stages

    def stage(self, chunk: int) -> int:
        """Return the stage of a model chunk."""
        virtual_stage, position = divmod(chunk, self.stages)
        return self._reflected(virtual_stage, position)

    def virtual_stage(self, chunk: int) -> int:
        """Return the index of a model chunk on its stage."""
        return chunk // self.stages

    def chunk(self, stage: int, virtual_stage: int) -> int:
        """Return the model chunk that is a given virtual stage of a stage."""
        return virtual_stage * self.stages + self._reflected(virtual_stage, stage)

    def source(self, chunk: int, *, is_forward: bool) -> tuple[bool, int] | None:
        """Return the action of the same micro-batch that computes the input of an action.

        It is given by whether it is forward, and by its chunk; None = the input needs no action.
        """
        if is_forward:
            return (True, chunk - 1) if chunk > 0 else None
        return (True, chunk) if chunk == self.chunks - 1 else (False, chunk + 1)

    def _reflected(self, virtual_stage: int, position: int) -> int:
        return self.stages - 1 - position if self.folded and virtual_stage % 2 else position


ActionLists = list[list[Action]]
"""For each stage, its actions in order."""


def actions_of(kind: Kind, virtual_stages: int, micro_batches: int) -> ActionLists:
    """Return the actions of one kind: for each virtual stage, one action per micro-batch."""
    return [
        [Action(kind, virtual_stage, micro_batch) for micro_batch in range(micro_batches)]
        for virtual_stage in range(virtual_stages)
    ]


def run_stages(stages: Sequence[Iterator[int]]) -> None:
    """Run the work of all stages, each until it needs a result of another stage, until all end.

    A stage yields the number of its actions so far whenever it needs a result that is not known.

    Raises:
        RuntimeError: the stages wait for each other.
    """
    counts: list[int | None] = []
    while stages:
        before, counts = counts, [next(stage, None) for stage in stages]
        if counts == before[::-1]:
            raise RuntimeError("the pipeline stages wait for each other")
        # Forward passes continue on the next stage and backward passes on the previous one. Hence
        # turns alternate between ascending and descending stages.
        stages = [s for s, count in zip(stages, counts, strict=True) if count is not None][::-1]


@dataclass(frozen=True)
class Schedule:
    """The actions of all stages in one step."""

    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    """For each stage, its actions in order."""

    @cached_property
    def most_passes(self) -> int:
        """How many passes, not split, the fullest stage holds, from forward to backward passes."""
        return max(
            max(accumulate(1 if kind == "forward" else -1 for kind, _, _ in actions))
            for actions in self.actions
        )


@lru_cache(maxsize=64)
def make_schedule(
    name: ScheduleName,
    stages: int,
    virtual_stages: int,
    micro_batches: int,
    waiting_weights: int,
    recomputes: bool,
) -> Schedule:
    """Return the actions of all stages in one step.

    `zb_h1` is `1f1b` with as many weight gradients waiting as the memory of the first stage allows.
    There are 2 virtual stages with `zb_v` and `v_half`, and 1 with `1f1b` and `zb_h1`. At most
    `waiting_weights` weight gradients of a stage, each of one micro-batch in one model chunk, may
    wait. 0 = `1f1b` and `interleaved` do not split backward passes, and the other schedules have no
    limit but the one of `defer`. `recomputes` says whether backward passes recompute the whole
    forward pass.
    """
    whole = pass_order(name, stages, virtual_stages, micro_batches)
    if not waiting_weights and name in ("1f1b", "interleaved"):
        return whole
    limit = waiting_weights or virtual_stages * micro_batches
    input_cost = 2 if recomputes else 1
    lists = defer(whole.placement, whole.actions, whole.most_passes, limit, input_cost)
    return Schedule(whole.placement, tuple(map(tuple, lists)))


@lru_cache(maxsize=64)
def pass_order(
    name: ScheduleName, stages: int, virtual_stages: int, micro_batches: int
) -> Schedule:
    """Return the forward and backward passes of all stages before backward passes are split.

    Splitting keeps their order, so a stage never holds less than with these passes.
    """
    folded: dict[ScheduleName, bool] = {
        "1f1b": False, "interleaved": False, "zb_h1": False, "zb_v": True, "v_half": True
    }  # fmt: skip
    placement = Placement(stages, virtual_stages, folded=folded[name])
    if placement.folded:
        lists = _v_order(stages, micro_batches, is_half=name == "v_half")
    else:
        lists = _interleaved_order(stages, virtual_stages, micro_batches)
    return Schedule(placement, tuple(map(tuple, lists)))


def forward_actions(placement: Placement, stage: int, micro_batches: int) -> list[Action]:
    """Return the forward passes of a stage for any number of micro-batches, for evaluation."""
    passes = actions_of("forward", placement.virtual_stages, micro_batches)
    if not placement.folded:
        return _in_groups(passes, placement.stages)

    def slot(action: Action) -> int:
        chunk = placement.chunk(stage, action.virtual_stage)
        return chunk + placement.virtual_stages * action.micro_batch

    return sorted(chain(*passes), key=slot)


def held(schedule: Schedule, stage: int, kept: Sequence[int], operands: Sequence[int]) -> int:
    """Return the peak bytes that a stage holds for later actions of a step.

    For each virtual stage, `kept` bytes are held from the forward pass of a micro-batch to its
    backward pass or input gradients, and `operands` from input gradients to weight gradients.
    """
    changes: dict[Kind, list[int]] = {
        "forward": [*kept],
        "backward": [-size for size in kept],
        "input_gradients": [new - old for new, old in zip(operands, kept, strict=True)],
        "weight_gradients": [-size for size in operands],
    }
    actions = schedule.actions[stage]
    return max(accumulate(changes[kind][virtual_stage] for kind, virtual_stage, _ in actions))


def _interleaved_order(stages: int, virtual_stages: int, micro_batches: int) -> ActionLists:
    """Return the passes of interleaved 1F1B, or of 1F1B if there is one virtual stage."""
    forward = _in_groups(actions_of("forward", virtual_stages, micro_batches), stages)
    backward = _in_groups(actions_of("backward", virtual_stages, micro_batches)[::-1], stages)
    first_group = _group_sizes(stages, micro_batches)[0]
    lists = []
    for stage in range(stages):
        warm_up = stages - stage - 1
        if virtual_stages > 1:
            warm_up = 2 * warm_up + (virtual_stages - 1) * first_group
        pairs = chain(*zip(forward[warm_up:], backward, strict=False))
        cool_down = backward[max(0, len(forward) - warm_up) :]
        lists.append([*forward[:warm_up], *pairs, *cool_down])
    return lists


def _group_sizes(stages: int, micro_batches: int) -> list[int]:
    """Divide micro-batches into even groups of at least `stages`, if there are so many.

    Larger groups come first, because no group may be larger than the one of the warm-up.
    """
    groups = max(1, micro_batches // stages)
    size, extra = divmod(micro_batches, groups)
    return [size + 1] * extra + [size] * (groups - extra)


def _in_groups(passes: Sequence[Sequence[Action]], stages: int) -> list[Action]:
    """Order passes by group of micro-batches, then by model chunk, then by micro-batch.

    `passes` has the passes of each model chunk of a stage by micro-batch.
    """
    borders = accumulate(_group_sizes(stages, len(passes[0])), initial=0)
    slices = [slice(first, last) for first, last in pairwise(borders)]
    return [action for group in slices for chunk in passes for action in chunk[group]]


def _v_order(stages: int, micro_batches: int, *, is_half: bool) -> ActionLists:
    """Return the passes of V-Half (arXiv:2405.15362, section 3), or else of ZB-V.

    A stage has a slot for each pass of the first micro-batch. Those of the next one are 6 slots
    later: 2 chunks have 3 actions each. The longer the passes of neighbouring stages are apart, the
    more activations are held, and the fewer gaps there are if costs are not equal.
    """
    # slots between neighbouring stages, on the way to the last stage and on the way back
    there, back = (2, 1) if is_half else (4, 2)
    # with this pause before the first backward pass, no two passes of a stage share a slot
    pause = (4 if stages % 2 == 0 else 1) if is_half else 0
    turn = there * (stages - 1) + 1  # slots until the last stage has both passes
    loss = turn + back * (stages - 1) + 1 + pause
    passes = (*actions_of("forward", 2, micro_batches), *actions_of("backward", 2, micro_batches))
    lists = []
    for stage in range(stages):
        from_last = back * (stages - 1 - stage)
        first_forward = [there * stage, turn + from_last]
        first_backward = [loss + turn + from_last, loss + there * stage]
        slots = {
            slot + 6 * action.micro_batch: action
            for slot, actions in zip(first_forward + first_backward, passes, strict=True)
            for action in actions
        }
        lists.append([slots[slot] for slot in sorted(slots)])
    return lists


def defer(
    placement: Placement,
    lists: Sequence[Sequence[Action]],
    capacity: int,
    limit: int,
    input_cost: int,
) -> ActionLists:
    """Split the backward passes of a schedule, and compute weight gradients in its gaps.

    Gaps follow from nominal costs: forward passes and weight gradients cost 1. A gap is then a
    whole number, so that the weight gradients in it delay nothing. Input gradients cost 2 if they
    recompute the forward pass. Weight gradients do not wait for a gap where more than `limit` would
    wait, or where a stage would hold more passes for later than `capacity`: as many as the fullest
    stage of the lists. From 1F1B this makes ZB-H1 (Qi et al., arXiv:2401.10241, section 2.3), in
    which the last stages hold as much as the first one.
    """
    micro_batches = len(lists[0]) // (2 * placement.virtual_stages)
    ends: _Ends = {
        (is_forward, chunk): [None] * micro_batches
        for is_forward in (True, False)
        for chunk in range(placement.chunks)
    }
    ends[None] = [0] * micro_batches  # what a pass needs that needs no other pass
    split = tuple(actions_of(kind, placement.virtual_stages, micro_batches) for kind in SPLIT_KINDS)
    stages = [_Stage(placement, stage, ends, split) for stage in range(placement.stages)]
    run_stages(
        [
            stage.add_passes(actions, capacity, limit, input_cost)
            for stage, actions in zip(stages, lists, strict=True)
        ]
    )
    return [stage.order for stage in stages]


class _Stage:
    """The actions of one stage."""

    def __init__(
        self, placement: Placement, stage: int, ends: _Ends, split: tuple[ActionLists, ...]
    ) -> None:
        self.order: list[Action] = []
        """The actions, with split backward passes."""
        # weight gradients that wait: virtual stage and micro-batch
        self._waiting: deque[tuple[int, int]] = deque()
        self._whole, self._inputs, self._weights = split
        chunks = [placement.chunk(stage, index) for index in range(placement.virtual_stages)]
        # by virtual stage: whether another stage waits for its input gradients
        self._sends = [chunk > 0 and placement.stage(chunk - 1) != stage for chunk in chunks]
        # by kind and virtual stage: the ends of the passes that a pass needs, and its own
        self._ends = {
            kind: [
                (ends[placement.source(chunk, is_forward=is_forward)], ends[is_forward, chunk])
                for chunk in chunks
            ]
            for kind, is_forward in (("forward", True), ("backward", False))
        }

    def add_passes(
        self, actions: Sequence[Action], capacity: int, limit: int, input_cost: int
    ) -> Iterator[int]:
        """Add passes in order, and yield where the input of a pass is not yet known."""
        now = held = 0  # a search runs this loop a million times, so it uses local variables
        order, waiting, add_weight_gradients = self.order, self._waiting, self._add_weight_gradients
        links, inputs = self._ends, self._inputs
        for action in actions:
            kind, virtual_stage, micro_batch = action
            needed, ends = links[kind][virtual_stage]
            is_forward = kind == "forward"
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
        is_last = self.order[-1] is self._inputs[virtual_stage][micro_batch]
        if is_last and not self._sends[virtual_stage]:
            self.order[-1] = self._whole[virtual_stage][micro_batch]
        else:
            self.order.append(self._weights[virtual_stage][micro_batch])
