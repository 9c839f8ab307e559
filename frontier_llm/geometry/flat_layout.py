"""Place the parameters of each unit in one flat buffer, followed by padding.

A unit is the parameters that are gathered and reduced together: the embedding, a layer or the head.
Matrices come first in its buffer, then norms and biases. Both are therefore contiguous ranges of
every shard. Only the range of the matrices may be quantised.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.inventory import ParameterShape, chunk_parameters, padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk


@dataclass(frozen=True)
class FlatLayout:
    """Positions in the flat buffer of a unit, counted in elements."""

    starts: tuple[int, ...]
    """First element of each parameter, in the order of the parameters passed to `flat_layout`."""
    decayed: int
    """The elements [0, decayed) belong to matrices, which are decayed by default."""
    used: int
    """The elements [0, used) belong to parameters; the rest is padding."""
    size: int
    """Number of elements of the buffer, padding included."""


def flat_layout(sizes: Sequence[int], decayed: Sequence[bool], multiple: int = 1) -> FlatLayout:
    """Place parameters in one buffer.

    Args:
        sizes: number of elements of each parameter.
        decayed: for each parameter, whether it is a matrix.
        multiple: the size of the buffer is rounded up to a multiple of this number.
    """
    starts = [0] * len(sizes)
    position = 0
    decayed_elements = 0
    for with_decay in (True, False):
        for index, (size, has_decay) in enumerate(zip(sizes, decayed, strict=True)):
            if has_decay is with_decay:
                starts[index] = position
                position += size
        if with_decay:
            decayed_elements = position
    padded_size = -(-position // multiple) * multiple
    return FlatLayout(tuple(starts), decayed_elements, position, padded_size)


def unit_layouts(
    model: ModelConfig,
    chunks: Sequence[ModelChunk],
    sequence_length: int,
    tensor: int,
    multiple: int = 1,
) -> dict[str, FlatLayout]:
    """Return the layout of the flat buffer of each unit of a stage on one tensor rank.

    A parameter that two chunks of the stage read, as embedding and as head, is in its unit once.

    Args:
        model: dimensions of the model.
        chunks: model chunks of the stage.
        sequence_length: number of rows of the learned position table.
        tensor: number of tensor ranks over which matrices are divided.
        multiple: the size of each buffer is rounded up to a multiple of this number.
    """
    shapes: dict[str, list[ParameterShape]] = {}
    for chunk in chunks:
        for shape in chunk_parameters(model, chunk, sequence_length):
            unit_shapes = shapes.setdefault(shape.unit, [])
            if shape not in unit_shapes:
                unit_shapes.append(shape)
    return {
        unit: flat_layout(
            [_local_elements(shape, model, tensor) for shape in unit_shapes],
            [shape.is_matrix for shape in unit_shapes],
            multiple,
        )
        for unit, unit_shapes in shapes.items()
    }


def _local_elements(shape: ParameterShape, model: ModelConfig, tensor: int) -> int:
    """Count the elements of a parameter on one tensor rank, with padding of the vocabulary."""
    dims = list(shape.shape)
    if shape.cut_dim is not None:
        if shape.name in ("embedding.tokens.weight", "head.weight"):
            dims[0] = padded_vocabulary(model, tensor)
        dims[shape.cut_dim] //= tensor
    return math.prod(dims)
