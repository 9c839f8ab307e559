"""Pipeline schedules as data: for each stage, a list of actions in the order of one step.

The executor (trainer/pipeline.py) runs these lists, the planner simulates them, and the counts of
memory and gathers follow from them. All ranks make the same lists, because the lists are functions
of a few integers. A stage receives messages in the order in which their sender sends them.

Without a pipeline, each micro-batch has a forward pass and then a backward pass. In the 1F1B
schedule, a stage starts with forward passes (warm-up), continues with pairs of one forward and one
backward pass, and ends with backward passes (cool-down; Narayanan et al., SC'21, section 2.2.1).
The interleaved schedule (section 2.2.2) has the same phases, but a stage has several model chunks.
Schedules that split backward passes are in zero_bubble.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Literal

from frontier_llm.geometry.deferral import defer, join, limit_waiting
from frontier_llm.geometry.pipeline_actions import (
    Action,
    ActionLists,
    Kind,
    Placement,
    actions_of,
)
from frontier_llm.geometry.zero_bubble import v_half, zb_h1, zb_v

__all__ = ["Action", "Kind", "Placement", "Schedule", "forward_actions", "held", "make_schedule"]

ScheduleName = Literal["1f1b", "interleaved", "zb_h1", "zb_v", "v_half"]
FOLDED = ("zb_v", "v_half")
"""Schedules with V placement."""


@dataclass(frozen=True)
class Schedule:
    """The actions of all stages in one step."""

    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    """For each stage, its actions in order."""


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
        name: name of the schedule.
        stages: pipeline stages.
        virtual_stages: model chunks per stage: 1 for `1f1b` and `zb_h1`, 2 for `zb_v` and `v_half`.
        micro_batches: micro-batches per replica and step.
        waiting_weights: how many weight gradients of a stage, each of one micro-batch and model
            chunk, may wait. 0 = backward passes are not split, except by schedules that are made of
            split passes. Those have their own rule, which a positive number limits.
        recomputes: whether the backward pass recomputes the whole forward pass.
    """
    placement = Placement(stages, virtual_stages, folded=name in FOLDED)
    if name in ("1f1b", "interleaved"):
        lists = _interleaved(stages, virtual_stages, micro_batches)
        if waiting_weights:
            lists = defer(placement, lists, waiting_weights, 2 if recomputes else 1)
    else:
        make = {"zb_h1": zb_h1, "zb_v": zb_v, "v_half": v_half}[name]
        lists = make(stages, micro_batches)
        if waiting_weights:
            lists = limit_waiting(lists, waiting_weights)
    return Schedule(placement, tuple(tuple(order) for order in join(placement, lists)))


def forward_actions(placement: Placement, stage: int, micro_batches: int) -> list[Action]:
    """Return the forward passes of a stage for any number of micro-batches, for evaluation."""
    forward = actions_of("forward", placement.virtual_stages, micro_batches)
    if not placement.folded:
        return list(_in_groups(forward, placement.stages))
    # The first micro-batch comes back to the stage after this many of them were sent ahead.
    ahead = min(2 * (placement.stages - stage) - 1, micro_batches)
    pairs = zip(forward[1], forward[0][ahead:], strict=False)
    return [*forward[0][:ahead], *chain(*pairs), *forward[1][micro_batches - ahead :]]


def held(schedule: Schedule, stage: int, kept: Sequence[int], factors: Sequence[int]) -> int:
    """Return the peak bytes that a stage holds for later actions of a step.

    Args:
        schedule: the schedule.
        stage: position on the pipeline axis.
        kept: for each virtual stage, the bytes kept from the forward pass of a micro-batch to its
            backward pass or input gradients.
        factors: for each virtual stage, the bytes kept from input gradients to weight gradients.
    """
    current = peak = 0
    for kind, virtual_stage, _ in schedule.actions[stage]:
        if kind in ("backward", "input_gradients"):
            current -= kept[virtual_stage]
        if kind == "weight_gradients":
            current -= factors[virtual_stage]
        if kind == "forward":
            current += kept[virtual_stage]
        if kind == "input_gradients":
            current += factors[virtual_stage]
        peak = max(peak, current)
    return peak


def _interleaved(stages: int, virtual_stages: int, micro_batches: int) -> ActionLists:
    """Return the actions of the interleaved schedule, or of 1F1B if there is one virtual stage."""
    all_forward = actions_of("forward", virtual_stages, micro_batches)
    all_backward = actions_of("backward", virtual_stages, micro_batches)
    forward = list(_in_groups(all_forward, stages))
    backward = list(_in_groups(all_backward[::-1], stages))
    group = _group_sizes(stages, micro_batches)[0]
    lists = []
    for stage in range(stages):
        warm_up = stages - stage - 1
        if virtual_stages > 1:
            warm_up = 2 * warm_up + (virtual_stages - 1) * group
        warm_up = min(warm_up, len(forward))
        pairs = zip(forward[warm_up:], backward, strict=False)
        cool_down = backward[len(forward) - warm_up :]
        lists.append([*forward[:warm_up], *chain(*pairs), *cool_down])
    return lists


def _group_sizes(stages: int, micro_batches: int) -> list[int]:
    """Divide micro-batches into groups of at least as many as stages, as even as possible.

    The first group is a largest one, because the warm-up of the interleaved schedule has as many
    micro-batches.
    """
    groups = max(1, micro_batches // stages)
    base, extra = divmod(micro_batches, groups)
    return [base + 1] * extra + [base] * (groups - extra)


def _in_groups(actions: Sequence[Sequence[Action]], stages: int) -> list[Action]:
    """Order actions by group, then by model chunk, then by micro-batch.

    Args:
        actions: for each model chunk of a stage, its actions by micro-batch.
        stages: pipeline stages.
    """
    ends = list(accumulate(_group_sizes(stages, len(actions[0]))))
    return [
        action
        for first, last in zip([0, *ends], ends, strict=False)
        for chunk_actions in actions
        for action in chunk_actions[first:last]
    ]
