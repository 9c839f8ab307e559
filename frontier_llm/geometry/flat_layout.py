"""Flat buffers: the position of each parameter in its unit's buffer, and the padding behind them.

Parameters with weight decay come first, so that the optimizer's two parameter groups are two
contiguous ranges of every interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.inventory import ParameterShape, chunk_parameters, padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk


@dataclass(frozen=True)
class FlatLayout:
    """Element ranges of a unit's parameters in its flat buffer."""

    starts: tuple[int, ...]
    """First element of each parameter, in the order given."""
    decayed: int
    """Elements [0, decayed) get weight decay."""
    used: int
    """Elements [0, used) belong to parameters; the rest is padding."""
    size: int
    """Elements of the buffer."""


def flat_layout(sizes: Sequence[int], decayed: Sequence[bool], multiple: int = 1) -> FlatLayout:
    """Place parameters of `sizes` elements in one buffer.

    Args:
        sizes: elements of each parameter.
        decayed: for each parameter, whether weight decay applies.
        multiple: the buffer's size is padded to a multiple of this.
    """
    starts = [0] * len(sizes)
    position = 0
    boundary = 0
    for wanted in (True, False):
        for index, (size, decays) in enumerate(zip(sizes, decayed, strict=True)):
            if decays is wanted:
                starts[index] = position
                position += size
        if wanted:
            boundary = position
    return FlatLayout(tuple(starts), boundary, position, -(-position // multiple) * multiple)


def unit_layouts(
    model: ModelConfig,
    chunks: Sequence[ModelChunk],
    sequence_length: int,
    tensor: int,
    multiple: int = 1,
) -> dict[str, FlatLayout]:
    """Return the flat buffer of each unit of a stage on one tensor rank.

    Args:
        model: dimensions.
        chunks: the stage's model chunks.
        sequence_length: rows of the learned position table.
        tensor: ranks over which matrices are cut.
        multiple: each buffer's size is padded to a multiple of this.
    """
    shapes: dict[str, list[ParameterShape]] = {}
    for chunk in chunks:
        for shape in chunk_parameters(model, chunk, sequence_length):
            shapes.setdefault(shape.unit, []).append(shape)
    return {
        unit: flat_layout(
            [_local_elements(shape, model, tensor) for shape in members],
            [shape.decayed for shape in members],
            multiple,
        )
        for unit, members in shapes.items()
    }


def _local_elements(shape: ParameterShape, model: ModelConfig, tensor: int) -> int:
    """Count a parameter's elements on one tensor rank, including the vocabulary's padding."""
    dims = list(shape.shape)
    if shape.cut_dim is not None:
        if shape.name in ("embedding.tokens.weight", "head.weight"):
            dims[0] = padded_vocabulary(model, tensor)
        dims[shape.cut_dim] //= tensor
    return math.prod(dims)
