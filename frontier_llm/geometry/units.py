"""The units of a stage: their sizes on one tensor rank, and how often they are gathered."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.flat_layout import FlatLayout, flat_layout
from frontier_llm.geometry.inventory import (
    ParameterShape,
    padded_vocabulary,
    piece_parameters,
)
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.schedule import stage_passes
from frontier_llm.geometry.stacks import piece_stacks
from frontier_llm.geometry.stages import Piece, make_pieces, pieces_of_stage
from frontier_llm.geometry.state_memory import in_flight, small_elements
from frontier_llm.geometry.state_traffic import Gathers

Event = tuple[str, str]
"""`acquire` or `release`, and the unit."""


def stage_pieces(config: RunConfig, stage: int) -> tuple[Piece, ...]:
    """Return a stage's pieces of the model, by chunk."""
    parallel = config.parallel
    pieces = make_pieces(
        config.model.layers, parallel.pipeline, parallel.chunks, parallel.layers_per_stage
    )
    return pieces_of_stage(pieces, stage)


def keeps_head(model: ModelConfig, pieces: Sequence[Piece]) -> bool:
    """Whether a stage holds a table that is both embedding and head.

    It is complete only after the look-up's backward pass, the stage's last.
    """
    return model.tied and any(piece.has_embedding and piece.has_head for piece in pieces)


def unit_layouts(config: RunConfig, stage: int, factors: Factors) -> dict[str, FlatLayout]:
    """Return the flat buffer of each unit on a tensor rank of a stage."""
    shapes: dict[str, list[ParameterShape]] = {}
    for piece in stage_pieces(config, stage):
        for shape in piece_parameters(config.model, piece, config.data.sequence_length):
            shapes.setdefault(shape.unit, []).append(shape)
    return {
        unit: flat_layout(
            [_local_elements(shape, config.model, config.parallel.tensor) for shape in members],
            [shape.decayed for shape in members],
            factors.multiple(),
        )
        for unit, members in shapes.items()
    }


def unit_elements(config: RunConfig, stage: int, factors: Factors) -> dict[str, int]:
    """Return the size of each unit's buffer on a tensor rank of a stage, padding included."""
    return {unit: layout.size for unit, layout in unit_layouts(config, stage, factors).items()}


def gathers_by_pass(
    config: RunConfig, stage: int, factors: Factors, micro_batches: int
) -> dict[str, Gathers]:
    """Count how often each unit is gathered in a step of a stage, where parameters are cut.

    A unit is acquired before its forward pass and again before its backward pass, but stays whole
    where it is needed again soon (state_memory.in_flight). (In a run's first step, whose order is
    not known beforehand, nothing stays.)
    """
    parallel = config.parallel
    passes = stage_passes(stage, parallel.pipeline, parallel.chunks, micro_batches)
    pieces = stage_pieces(config, stage)
    events = [
        (forward, event)
        for forward, chunk in passes
        for event in _events(config.model, pieces[chunk], forward=forward)
    ]
    sizes = unit_elements(config, stage, factors)
    limit = small_elements(Counter(sizes.values()))
    small = {unit for unit, size in sizes.items() if size <= limit}
    return _count(events, small, config.sharding.units_in_flight)


def _events(model: ModelConfig, piece: Piece, *, forward: bool) -> Iterator[Event]:
    """Yield what one pass does with units (trainer/hooks.py does the same with modules)."""
    table = ["embedding", "positions"] if model.positions == "learned" else ["embedding"]
    output = "embedding" if model.tied else "head"
    middle = []
    for stack in piece_stacks(model, piece):
        # a table of relative positions is read just before the first layer, as part of its unit
        middle += [f"layers.{layer}" for layer in stack.layers]
        middle += [stack.norm] if stack.ends else []
    middle += [output] if piece.has_head else []
    if forward:
        if piece.has_embedding:
            yield from (("acquire", unit) for unit in table)
            yield from (("release", unit) for unit in table)
        for unit in middle:
            yield "acquire", unit
            yield "release", unit
        return
    # a table that is the head's too is complete only after its look-up's backward pass
    late = output if keeps_head(model, [piece]) else None
    for unit in reversed(middle):
        yield "acquire", unit
        if unit != late:
            yield "release", unit
    if late:
        yield "release", late


def _count(
    events: Sequence[tuple[bool, Event]], small: Collection[str], units_in_flight: int
) -> dict[str, Gathers]:
    gathered: dict[str, Gathers] = {}
    whole: set[str] = set()
    uses = [(unit, not forward) for forward, (kind, unit) in events if kind == "acquire"]
    position = 0
    reading: list[tuple[str, bool]] = []
    for forward, (kind, unit) in events:
        if kind == "acquire":
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
        if unit not in dict(in_flight(ahead, small, units_in_flight)):
            whole.discard(unit)
    return gathered


def _local_elements(shape: ParameterShape, model: ModelConfig, tensor: int) -> int:
    """Count a parameter's elements on one tensor rank, the vocabulary's padding included."""
    dims = list(shape.shape)
    if shape.cut_dim is not None:
        if shape.name in ("embedding.tokens.weight", "head.weight"):
            dims[0] = padded_vocabulary(model, tensor)
        dims[shape.cut_dim] //= tensor
    return math.prod(dims)
