"""Count how often a stage gathers each of its units in a step.

A unit is the parameters that are gathered together: the embedding, a layer or the head. The count
follows the prefetching of the sharding engine.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks, has_shared_table
from frontier_llm.geometry.pipeline_actions import Action
from frontier_llm.geometry.state_memory import prefetch_window, small_elements
from frontier_llm.geometry.state_traffic import Gathers


class _Event(NamedTuple):
    """The moment at which a pass starts or stops using a unit."""

    forward: bool
    """Whether the pass is a forward pass."""
    acquires: bool
    """True if the pass starts to read the unit, False if it no longer needs the unit."""
    unit: str


def count_gathers(
    model: ModelConfig,
    chunks: Sequence[ModelChunk],
    actions: Sequence[Action],
    sizes: Mapping[str, int],
    units_in_flight: int,
) -> dict[str, Gathers]:
    """Count how often each unit is gathered in a step of a stage whose parameters are sharded.

    A unit is needed in the forward pass and again in the backward pass. It stays gathered in
    between if it is needed again soon (`state_memory.prefetch_window`). The count does not hold for
    the first step of a run, in which the order of the passes is not known yet and no unit stays.

    Args:
        model: dimensions of the model.
        chunks: model chunks of the stage.
        actions: actions of the stage in one step. Weight gradients read no parameters.
        sizes: elements of the buffer of each unit, padding included.
        units_in_flight: `sharding.units_in_flight`.
    """
    events = [
        event
        for kind, virtual_stage, _ in actions
        if kind != "weight_gradients"
        for event in _events(model, chunks[virtual_stage], forward=kind == "forward")
    ]
    limit = small_elements(Counter(sizes.values()))
    small = {unit for unit, size in sizes.items() if size <= limit}
    return _count(events, small, units_in_flight)


def _events(model: ModelConfig, chunk: ModelChunk, *, forward: bool) -> Iterator[_Event]:
    """Yield the moments at which one pass starts and stops using units, as in engine/hooks.py."""
    tables = ["embedding", "positions"] if model.positions == "learned" else ["embedding"]
    output = "embedding" if model.tied else "head"
    units = []  # all units after the embedding, in the order of the forward pass
    for stack in chunk_stacks(model, chunk):
        # the table of relative positions belongs to the unit of the first layer
        units += [f"layers.{layer}" for layer in stack.layers]
        units += [stack.norm_unit] if stack.ends else []
    units += [output] if chunk.has_head else []
    if forward:
        if chunk.has_embedding:
            yield from (_Event(forward, True, unit) for unit in tables)
            yield from (_Event(forward, False, unit) for unit in tables)
        for unit in units:
            yield _Event(forward, True, unit)
            yield _Event(forward, False, unit)
        return
    # The gradient of a table that is both embedding and head is complete only after the backward
    # pass of the embedding, so this table is released last.
    shared_table = output if has_shared_table(model, [chunk]) else None
    for unit in reversed(units):
        yield _Event(forward, True, unit)
        if unit != shared_table:
            yield _Event(forward, False, unit)
    if shared_table:
        yield _Event(forward, False, shared_table)


def _count(
    events: Sequence[_Event], small: Collection[str], units_in_flight: int
) -> dict[str, Gathers]:
    """Count gathers from the moments of a step, with this many large units in the window."""
    gathers: dict[str, Gathers] = {}
    gathered: set[str] = set()  # units that have memory at this moment
    uses = [(event.unit, not event.forward) for event in events if event.acquires]
    position = 0  # index of the next use
    reading: list[tuple[str, bool]] = []  # the use that has started and not stopped
    for forward, acquires, unit in events:
        if acquires:
            reading = [uses[position]]
            position += 1
            count, is_missing = gathers.get(unit, Gathers(0, 0)), unit not in gathered
            gathers[unit] = Gathers(
                count.forward + (is_missing and forward),
                count.backward + (is_missing and not forward),
            )
            gathered.add(unit)
            continue
        reading = [use for use in reading if use[0] != unit]
        next_uses = chain(reading, map(uses.__getitem__, range(position, len(uses))))
        if unit not in dict(prefetch_window(next_uses, small, units_in_flight)):
            gathered.discard(unit)
    return gathers
