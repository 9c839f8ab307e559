"""Find the elements of the model's tensors that a shard holds.

A global tensor is a whole tensor of the model. A local parameter is what one rank computes with,
after tensor parallelism; it may hold parts of several global tensors. A placement says where a box
(a rectangular block) of a global tensor lies inside a local parameter. A shard is a range of a
flattened local parameter. Local parameters and boxes are both stored row by row, so a shard holds
contiguous ranges of flattened boxes. A checkpoint stores "elements [first, first + count) of this
box of this tensor", which does not depend on the layout. A reader splits such a range into smaller
boxes, which it can copy as slices of a tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frontier_llm.protocols import Placement  # imports torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlacedRange:
    """Elements that are contiguous both in a shard and in the flattened box of a placement."""

    placement: "Placement"
    first: int
    """Index of the first element in the flattened box."""
    count: int
    offset: int
    """Index of the first element in the shard."""


def placed_ranges(
    placements: Sequence["Placement"], local_shape: Sequence[int], start: int, count: int
) -> Iterator[PlacedRange]:
    """Yield the parts of a shard that placements cover. All other elements are padding.

    The shard is elements [start, start + count) of the flattened local parameter.
    """
    for placement in placements:
        for local_first, box_first, length in _contiguous_ranges(placement, local_shape):
            first = max(start, local_first)
            stop = min(start + count, local_first + length)
            if first < stop:
                box_start = box_first + first - local_first
                yield PlacedRange(placement, box_start, stop - first, first - start)


def split_into_boxes(shape: Sequence[int], first: int, count: int) -> Iterator[tuple[Shape, Shape]]:
    """Split a range of a flattened box into boxes, in the order of the range.

    In two dimensions there are at most three boxes: the end of a row, whole rows, and the beginning
    of a row. In d dimensions there are at most 2 d - 1 boxes. Yields (index of the first element
    inside the given box, shape of the smaller box).
    """
    if not shape:
        yield (), ()
        return
    row_elements = prod(shape[1:])
    position, stop = first, first + count
    while position < stop:
        row, column = divmod(position, row_elements)
        if not column and stop - position >= row_elements:
            rows = (stop - position) // row_elements
            yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            position += rows * row_elements
            continue
        length = min(row_elements - column, stop - position)
        for start, extent in split_into_boxes(shape[1:], column, length):
            yield (row, *start), (1, *extent)
        position += length


def _contiguous_ranges(
    placement: "Placement", local_shape: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous ranges of the flattened parameter that a placement's box covers.

    Yields (first element in the parameter, first element in the box, number of elements).
    """
    shape = placement.shape
    if 0 in shape:
        return
    inner = len(shape)  # from this dim on, the box is as large as the parameter
    while inner and shape[inner - 1] == local_shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # from this dim on, elements of the box are contiguous
    length = prod(shape[outer:])
    for number, index in enumerate(product(*map(range, shape[:outer]))):
        first = 0
        for dim, size in enumerate(local_shape):
            index_in_box = index[dim] if dim < outer else 0
            first = first * size + placement.local_start[dim] + index_in_box
        yield first, number * length, length
