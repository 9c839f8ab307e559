"""Pipeline schedules as data: for each stage, a list of its actions in one step, in order.

The executor (trainer/pipeline.py) runs these lists and the planner simulates them. All ranks make
the same lists, because the lists are functions of a few integers.

A schedule is an order of forward and backward passes, whose backward passes may then be split
(deferral.py). There are three orders:

- 1F1B: a stage starts with forward passes (warm-up), continues with pairs of one forward and one
  backward pass, and ends with backward passes (cool-down; Narayanan et al., SC'21, section 2.2.1).
- Interleaved 1F1B (section 2.2.2) has the same phases, but each stage has several model chunks. A
  group of micro-batches passes the first chunk of a stage, then the second one, and so on.
- V placement with two chunks per stage (Qi et al., arXiv:2401.10241, section 6): each pass of
  micro-batch i + 1 comes a fixed time after that of micro-batch i, which makes time for all the
  work of one micro-batch (Qi et al., arXiv:2405.15362).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise

from frontier_llm.config.parallel import ScheduleName
from frontier_llm.geometry.deferral import defer
from frontier_llm.geometry.pipeline_actions import (
    Action,
    ActionLists,
    Kind,
    Placement,
    actions_of,
)

__all__ = [
    "Action",
    "Kind",
    "Placement",
    "Schedule",
    "ScheduleName",
    "forward_actions",
    "held",
    "make_schedule",
    "pass_order",
]

FOLDED = ("zb_v", "v_half")
"""Schedules with V placement."""


@dataclass(frozen=True)
class Schedule:
    """The actions of all stages in one step."""

    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    """For each stage, its actions in order."""

    @cached_property
    def most_passes(self) -> int:
        """How many passes the fullest stage holds, from forward to backward passes.

        The backward passes must not be split.
        """
        return max(
            max(accumulate(1 if kind == "forward" else -1 for kind, _, _ in actions))
            for actions in self.actions
        )


@lru_cache(maxsize=8)
def make_schedule(
    name: ScheduleName,
    stages: int,
    virtual_stages: int,
    micro_batches: int,
    waiting_weights: int,
    recomputes: bool,
) -> Schedule:
    """Return the actions of all stages in one step.

    Args:
        name: name of the schedule. `zb_h1` is `1f1b` with as many weight gradients waiting as the
            memory of the first stage allows.
        stages: pipeline stages.
        virtual_stages: model chunks per stage: 1 for `1f1b` and `zb_h1`, 2 for `zb_v` and `v_half`.
        micro_batches: micro-batches per replica and step.
        waiting_weights: how many weight gradients of a stage, each of one micro-batch in one model
            chunk, may wait. 0 = `1f1b` and `interleaved` do not split backward passes, and the
            other schedules have no limit but the one of `defer`.
        recomputes: whether backward passes recompute the whole forward pass.
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

    Args:
        schedule: the schedule.
        stage: position on the pipeline axis.
        kept: for each virtual stage, the bytes kept from the forward pass of a micro-batch to its
            backward pass or input gradients.
        operands: for each virtual stage, the bytes kept from input gradients to weight gradients.
    """
    changes: dict[Kind, list[int]] = {
        "forward": [*kept],
        "backward": [-size for size in kept],
        "input_gradients": [new - old for new, old in zip(operands, kept, strict=True)],
        "weight_gradients": [-size for size in operands],
    }
    actions = schedule.actions[stage]
    return max(accumulate(changes[action.kind][action.virtual_stage] for action in actions))


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
    """Divide micro-batches into groups as even as possible, of at least `stages` if there are.

    Larger groups come first, because no group may be larger than the one of the warm-up.
    """
    groups = max(1, micro_batches // stages)
    size, extra = divmod(micro_batches, groups)
    return [size + 1] * extra + [size] * (groups - extra)


def _in_groups(passes: Sequence[Sequence[Action]], stages: int) -> list[Action]:
    """Order passes by group of micro-batches, then by model chunk, then by micro-batch.

    Args:
        passes: for each model chunk of a stage, its passes by micro-batch.
        stages: pipeline stages.
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
