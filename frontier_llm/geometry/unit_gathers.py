"""Count how often a stage gathers each of its units in a step."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks, has_shared_table
from frontier_llm.geometry.pipeline_schedule import Pass
from frontier_llm.geometry.state_memory import prefetch_window, small_elements
from frontier_llm.geometry.state_traffic import Gathers


class _Event(NamedTuple):
    """The moment at which a pass begins or ends to need a unit."""

    forward: bool
    acquires: bool
    """True if the pass begins to read the unit, False if it no longer needs it."""
    unit: str


def count_gathers(
    model: ModelConfig,
    chunks: Sequence[ModelChunk],
    passes: Sequence[Pass],
    sizes: Mapping[str, int],
    units_in_flight: int,
) -> dict[str, Gathers]:
    """Count how often each unit is gathered in a step of a stage whose parameters are cut.

    A unit is acquired before its forward pass and again before its backward pass, but stays
    gathered if it is needed again soon (`state_memory.prefetch_window`). In the first step of a
    run nothing stays, because the order of the passes is not known yet.

    Args:
        model: dimensions.
        chunks: the stage's model chunks.
        passes: the stage's passes of one step (`pipeline_schedule.stage_passes`).
        sizes: elements of each unit's buffer, padding included.
        units_in_flight: `sharding.units_in_flight`.
    """
    events = [
        event
        for forward, virtual_stage in passes
        for event in _events(model, chunks[virtual_stage], forward=forward)
    ]
    limit = small_elements(Counter(sizes.values()))
    small = {unit for unit, size in sizes.items() if size <= limit}
    return _count(events, small, units_in_flight)


def _events(model: ModelConfig, chunk: ModelChunk, *, forward: bool) -> Iterator[_Event]:
    """Yield how one pass uses units (trainer/hooks.py does the same with modules)."""
    table = ["embedding", "positions"] if model.positions == "learned" else ["embedding"]
    output = "embedding" if model.tied else "head"
    middle = []
    for stack in chunk_stacks(model, chunk):
        # a table of relative positions is read just before the first layer, as part of its unit
        middle += [f"layers.{layer}" for layer in stack.layers]
        middle += [stack.norm] if stack.ends else []
    middle += [output] if chunk.has_head else []
    if forward:
        if chunk.has_embedding:
            yield from (_Event(forward, True, unit) for unit in table)
            yield from (_Event(forward, False, unit) for unit in table)
        for unit in middle:
            yield _Event(forward, True, unit)
            yield _Event(forward, False, unit)
        return
    # a table that is also the head is complete only after the embedding's backward pass
    late = output if has_shared_table(model, [chunk]) else None
    for unit in reversed(middle):
        yield _Event(forward, True, unit)
        if unit != late:
            yield _Event(forward, False, unit)
    if late:
        yield _Event(forward, False, late)


def _count(
    events: Sequence[_Event], small: Collection[str], units_in_flight: int
) -> dict[str, Gathers]:
    gathered: dict[str, Gathers] = {}
    whole: set[str] = set()
    uses = [(event.unit, not event.forward) for event in events if event.acquires]
    position = 0
    reading: list[tuple[str, bool]] = []
    for forward, acquires, unit in events:
        if acquires:
            reading = [uses[position]]
            position += 1
            before, is_new = gathered.get(unit, Gathers(0, 0)), unit not in whole
            gathered[unit] = Gathers(
                before.forward + (is_new and forward), before.backward + (is_new and not forward)
            )
            whole.add(unit)
            continue
        reading = [use for use in reading if use[0] != unit]
        ahead = chain(reading, map(uses.__getitem__, range(position, len(uses))))
        if unit not in dict(prefetch_window(ahead, small, units_in_flight)):
            whole.discard(unit)
    return gathered
