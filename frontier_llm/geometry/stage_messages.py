"""The messages between the stages of a pipeline, which follow from the lists of their actions."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from frontier_llm.geometry.pipeline_actions import Action, Placement


class Message(NamedTuple):
    """An activation, or the gradient of one, of a micro-batch."""

    forward: bool
    """Whether it is an activation, which goes to the next model chunk."""
    chunk: int
    """Index, in the order of the forward pass, of the model chunk that reads the message."""
    micro_batch: int


Incoming = Sequence[tuple[int, Message]]
"""All messages that a stage receives in a step, each with the stage that sends it. Those of one
stage are in the order in which it sends them."""


def incoming(
    placement: Placement, stage: int, actions: Callable[[int], Sequence[Action]]
) -> Incoming:
    """Return the messages that a stage receives from other stages.

    Args:
        placement: on which stage each model chunk is.
        stage: the stage that receives.
        actions: returns the actions of a stage, in order.
    """
    return [
        (sender, message)
        for sender in range(placement.stages)
        if sender != stage and _are_neighbours(placement, sender, stage)
        for message in results(placement, sender, actions(sender))
        if placement.stage(message.chunk) == stage
    ]


def results(placement: Placement, stage: int, actions: Sequence[Action]) -> Iterator[Message]:
    """Yield the results of a stage's actions that another model chunk reads, in order."""
    for kind, virtual_stage, micro_batch in actions:
        chunk = placement.chunk(stage, virtual_stage)
        if kind == "forward" and chunk < placement.chunks - 1:
            yield Message(True, chunk + 1, micro_batch)
        elif kind in ("backward", "input_gradients") and chunk > 0:
            yield Message(False, chunk - 1, micro_batch)


def _are_neighbours(placement: Placement, one: int, other: int) -> bool:
    """Return whether two stages may have consecutive model chunks."""
    return (one - other) % placement.stages in (1, placement.stages - 1)
