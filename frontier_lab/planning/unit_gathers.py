"""Count how often a stage gathers each unit of sharded parameters in a step."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.model_chunks import (
    ModelChunk,
    chunk_stacks,
    chunk_tables,
    has_shared_table,
)
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import prefetch_window, small_elements


class Gathers(NamedTuple):
    """Number of times that a unit is gathered per step, for forward and for backward passes."""

    forward: int
    backward: int


def count_gathers(layout: ResolvedLayout, stage: int) -> dict[str, Gathers]:
    """Count how often a stage gathers each unit in a step if parameters are sharded.

    A unit is needed in the forward pass and again in the backward pass. It stays gathered in
    between if it is needed again soon (`state_memory.prefetch_window`). The count does not hold for
    the first step of a run, in which the order of the passes is not known yet and no unit stays.
    Weight gradients, among the actions of the stage, read no parameters.
    """
    chunks, sizes = layout.chunks_of_stage(stage), layout.unit_sizes(stage)
    events = [
        (kind == "forward", acquires, unit)
        for kind, virtual_stage, _ in layout.schedule.actions[stage]
        if kind != "weight_gradients"
        for acquires, unit in _events(
            layout.model, chunks[virtual_stage], forward=kind == "forward"
        )
    ]
    limit = small_elements(Counter(sizes.values()))
    small = {unit for unit, size in sizes.items() if size <= limit}
    uses = [(unit, not forward) for forward, acquires, unit in events if acquires]
    counts: Counter[tuple[str, bool]] = Counter()  # by unit and whether a backward pass reads it
    gathered: set[str] = set()  # units that have memory at this moment
    position = 0  # index of the next use
    reading: list[tuple[str, bool]] = []  # the use that has started and not stopped
    for _, acquires, unit in events:
        if acquires:
            reading = [uses[position]]
            counts[uses[position]] += unit not in gathered
            gathered.add(unit)
            position += 1
            continue
        reading = [use for use in reading if use[0] != unit]
        next_uses = chain(reading, map(uses.__getitem__, range(position, len(uses))))
        if unit not in dict(prefetch_window(next_uses, small, layout.units_in_flight)):
            gathered.discard(unit)
    return {unit: Gathers(counts[unit, False], counts[unit, True]) for unit, _ in uses}


def _events(model: ModelConfig, chunk: ModelChunk, *, forward: bool) -> Iterator[tuple[bool, str]]:
    """Yield the units that one pass starts (true) or stops using, as in engine/hooks.py."""
    output = "embedding" if model.tied else "head"
    units = []  # all units after the embedding, in the order of the forward pass
    for stack in chunk_stacks(model, chunk):
        # the table of relative positions belongs to the unit of the first layer
        units += [f"layers.{layer}" for layer in stack.layers]
        units += [stack.norm_unit] if stack.ends else []
    units += [output] if chunk.has_head else []
    if forward:
        for table in chunk_tables(model, chunk):
            read_at_once = (table, "positions") if model.positions == "learned" else (table,)
            yield from ((True, unit) for unit in read_at_once)
            yield from ((False, unit) for unit in read_at_once)
        for unit in units:
            yield True, unit
            yield False, unit
        return
    # The gradient of a table that is both embedding and head is complete only after the backward
    # pass of the embedding, so this table is released last.
    shared_table = output if has_shared_table(model, [chunk]) else None
    for unit in reversed(units):
        yield True, unit
        if unit != shared_table:
            yield False, unit
    if shared_table:
        yield False, shared_table
