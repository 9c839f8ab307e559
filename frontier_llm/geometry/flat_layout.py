"""Place the parameters of each unit in one flat buffer, followed by padding.

A unit is the parameters that are gathered and reduced together: the embedding, a layer or the head.
Matrices come first in its buffer, then norms and biases. Both are therefore contiguous ranges of
every shard. Only the range of the matrices may be quantised. Matrices that an optimizer updates as
a whole come before the others, and the intervals of ranks end between them (`partition.Cut`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.inventory import ParameterShape, chunk_parameters, padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.partition import whole_bounds


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
    whole_starts: tuple[int, ...] = ()
    """First element of each matrix that an optimizer updates as a whole, ascending."""
    whole: int = 0
    """The elements [0, whole) belong to these matrices."""
    bounds: tuple[int, ...] = ()
    """Bounds of the optimizer intervals (`Cut.bounds`); empty = equal intervals."""
    factored: int = 0
    """Number of sums over rows and columns of the matrices, if the second moments are factored."""

    def padded(self, multiple: int) -> "FlatLayout":
        """Return the layout with a size that is rounded up to a multiple of a number."""
        return replace(self, size=-(-self.used // multiple) * multiple)


UnitRuns = Sequence[tuple[FlatLayout, int]]
"""The buffers of consecutive units: for each run of equal ones, one of them and their number."""


def flat_layout(
    sizes: Sequence[int],
    decayed: Sequence[bool],
    multiple: int = 1,
    whole_names: Sequence[str | None] = (),
) -> FlatLayout:
    """Place parameters in one buffer, whose size is rounded up to a multiple of a number.

    For each parameter, `decayed` says whether it is a matrix. `whole_names` has its name if it is a
    matrix that an optimizer updates as a whole, else None; empty = there is none.
    """
    names = whole_names or [None] * len(sizes)
    kinds = list(zip(decayed, names, range(len(sizes)), strict=True))
    # matrices that stay whole by name, other matrices, norms and biases
    order = sorted(kinds, key=lambda kind: (not kind[0], kind[1] is None, kind[1] or ""))
    starts = [0] * len(sizes)
    position = decayed_elements = whole = 0
    for is_decayed, name, index in order:
        starts[index] = position
        position += sizes[index]
        decayed_elements = position if is_decayed else decayed_elements
        whole = whole if name is None else position
    padded_size = -(-position // multiple) * multiple
    whole_starts = sorted(
        start for start, name in zip(starts, names, strict=True) if name is not None
    )
    return FlatLayout(
        tuple(starts), decayed_elements, position, padded_size, tuple(whole_starts), whole
    )


def divided_layouts(layouts: Sequence[FlatLayout], parts: int) -> list[FlatLayout]:
    """Return layouts whose optimizer intervals do not end inside a matrix that stays whole.

    `layouts` are the buffers of all trained units of a rank, in the order of the forward pass.
    """
    if parts == 1:
        return list(layouts)
    units = tuple((layout.whole_starts, layout.size) for layout in layouts)
    bounds = whole_bounds(units, parts)
    return [
        replace(layout, bounds=of_layout) for layout, of_layout in zip(layouts, bounds, strict=True)
    ]


def unit_runs(layouts: Iterable[FlatLayout]) -> UnitRuns:
    """Count equal neighbours among the buffers of units."""
    return [(layout, len(list(equal))) for layout, equal in groupby(layouts)]


def padded_runs(runs: UnitRuns, multiple: int, parts: int) -> UnitRuns:
    """Return all units of a rank with padding, and as `divided_layouts` divides them."""
    padded = [(layout.padded(multiple), count) for layout, count in runs]
    if parts == 1 or not any(layout.whole for layout, _ in padded):
        return padded
    each = [layout for layout, count in padded for _ in range(count)]
    return unit_runs(divided_layouts(each, parts))


def unit_layouts(
    model: ModelConfig,
    chunks: Sequence[ModelChunk],
    sequence_length: int,
    tensor: int,
    *,
    keeps_whole: bool = False,
    factors_moments: bool = False,
) -> dict[str, FlatLayout]:
    """Return the layout of each unit of a stage on one tensor rank, without padding.

    A parameter that two chunks of the stage read, as embedding and as head, is in its unit once.
    The optimizer may update the matrices of layers as a whole, and may factor second moments.
    """
    shapes: dict[str, list[ParameterShape]] = {}
    for chunk in chunks:
        for shape in chunk_parameters(model, chunk, sequence_length):
            unit_shapes = shapes.setdefault(shape.unit, [])
            if shape not in unit_shapes:
                unit_shapes.append(shape)
    layouts = [
        _unit_layout(unit_shapes, model, tensor, keeps_whole=keeps_whole)
        for unit_shapes in shapes.values()
    ]
    if factors_moments:
        layouts = [
            replace(layout, factored=sum(_sums(shape, model, tensor) for shape in unit_shapes))
            for layout, unit_shapes in zip(layouts, shapes.values(), strict=True)
        ]
    return dict(zip(shapes, layouts, strict=True))


def _unit_layout(
    shapes: Sequence[ParameterShape], model: ModelConfig, tensor: int, *, keeps_whole: bool
) -> FlatLayout:
    sizes, decayed, names = list[int](), list[bool](), list[str | None]()
    for shape in shapes:
        elements = math.prod(_local_shape(shape, model, tensor))
        is_whole = keeps_whole and shape.is_matrix_of_layer
        gate = shape.name.replace(".ffn.up.", ".ffn.gate.")
        if is_whole and gate != shape.name and gate in names:  # one parameter of the modules
            sizes[names.index(gate)] += elements
            continue
        sizes.append(elements)
        decayed.append(shape.is_matrix)
        names.append(shape.name if is_whole else None)
    return flat_layout(sizes, decayed, whole_names=names)


def _sums(shape: ParameterShape, model: ModelConfig, tensor: int) -> int:
    """Count the sums of a parameter on one tensor rank: a row's, and of each matrix a column's."""
    if not shape.is_matrix or len(shape.shape) != 2:
        return 0
    fused = {"attention.qkv": 3, "attention.key_value": 2, "cross_attention.key_value": 2}
    rows, columns = _local_shape(shape, model, tensor)
    return rows + columns * fused.get(shape.module, 1)


def _local_shape(shape: ParameterShape, model: ModelConfig, tensor: int) -> list[int]:
    """Return the shape of a parameter on one tensor rank, with padding of the vocabulary."""
    dims = list(shape.shape)
    if shape.cut_dim is not None:
        if shape.name.endswith(("embedding.tokens.weight", "head.weight")):
            dims[0] = padded_vocabulary(model, tensor)
        dims[shape.cut_dim] //= tensor
    return dims
