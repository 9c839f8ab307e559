"""The messages between the stages of a pipeline, which follow from the lists of their actions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from frontier_llm.geometry.pipeline_actions import Action, Placement


class Message(NamedTuple):
    """An activation, or the gradient of one, of a micro-batch."""

    forward: bool
    """Whether it is an activation, which goes to the next model chunk."""
    chunk: int
    """Index, in the order of the forward pass, of the model chunk that reads the message."""
    micro_batch: int


class Arrival(NamedTuple):
    """A message that a stage receives."""

    sender: int
    """The stage that sends it."""
    message: Message
    delivered: int
    """How many messages of the receiver the sender has read before it sends this one."""


def incoming(
    placement: Placement, stage: int, actions: Callable[[int], Sequence[Action]]
) -> list[Arrival]:
    """Return what a stage receives from other stages in a step.

    The messages of each sender are in the order in which it sends them.

    Args:
        placement: on which stage each model chunk is.
        stage: the stage that receives.
        actions: returns the actions of a stage, in order.
    """
    arrivals = []
    for sender in range(placement.stages):
        if sender == stage or not _are_neighbours(placement, sender, stage):
            continue
        delivered = 0
        for action in actions(sender):
            delivered += _source_stage(placement, sender, action) == stage
            message = result(placement, sender, action)
            if message and placement.stage(message.chunk) == stage:
                arrivals.append(Arrival(sender, message, delivered))
    return arrivals


def result(placement: Placement, stage: int, action: Action) -> Message | None:
    """Return the message with the result of an action; None if no other chunk reads the result."""
    kind, virtual_stage, micro_batch = action
    chunk = placement.chunk(stage, virtual_stage)
    if kind == "forward" and chunk < placement.chunks - 1:
        return Message(True, chunk + 1, micro_batch)
    if kind in ("backward", "input_gradients") and chunk > 0:
        return Message(False, chunk - 1, micro_batch)
    return None


def _source_stage(placement: Placement, stage: int, action: Action) -> int | None:
    """Return the stage that computes the input of an action; None if there is no such input."""
    chunk = placement.chunk(stage, action.virtual_stage)
    source = chunk - 1 if action.kind == "forward" else chunk + 1
    if action.kind == "weight_gradients" or not 0 <= source < placement.chunks:
        return None
    return placement.stage(source)


def _are_neighbours(placement: Placement, one: int, other: int) -> bool:
    """Return whether two stages may have consecutive model chunks."""
    return (one - other) % placement.stages in (1, placement.stages - 1)
