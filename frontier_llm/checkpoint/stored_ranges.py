"""Find the elements of global tensors that a shard holds.

A shard is a range of a flattened *local* parameter. A placement says where a box (a contiguous
block of indices) of a global tensor lies inside a local parameter. Local parameters and boxes are
stored row by row, so a shard holds contiguous ranges of flattened boxes. A checkpoint can therefore
store "elements [first, first + count) of this box of that tensor" without knowing the layout. A
reader splits such a range into smaller boxes, which it can copy as slices of a tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from frontier_llm.protocols import Placement

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlacedRange:
    """Elements that are contiguous both in a shard and in the flattened box of a placement."""

    placement: Placement
    """The placement whose box holds the elements."""
    first: int
    """Index of the first element in the flattened box."""
    count: int
    """Number of elements."""
    offset: int
    """Index of the first element in the shard."""


def placed_ranges(
    placements: Sequence[Placement], local_shape: Sequence[int], start: int, count: int
) -> Iterator[PlacedRange]:
    """Yield the parts of a range that placements cover. All other elements are padding.

    Args:
        placements: placements of the parameter.
        local_shape: shape of the local parameter.
        start: first element of the range in the flattened parameter.
        count: number of elements in the range.
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

    In d dimensions there are at most 2 d - 1 of them: the end of a row, whole rows, and the
    beginning of a row.

    Args:
        shape: shape of the box.
        first: first element of the range.
        count: number of elements in the range, at least one.

    Yields:
        (first index inside the box, shape).
    """
    if not shape:
        yield (), ()
        return
    row_elements = prod(shape[1:])
    position, stop = first, first + count
    while position < stop:
        row, within = divmod(position, row_elements)
        if not within and stop - position >= row_elements:
            rows = (stop - position) // row_elements
            yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            position += rows * row_elements
            continue
        length = min(row_elements - within, stop - position)
        for start, extent in split_into_boxes(shape[1:], within, length):
            yield (row, *start), (1, *extent)
        position += length


def _contiguous_ranges(
    placement: Placement, local_shape: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous ranges of the flattened parameter that a placement's box covers.

    Yields:
        (first element in the parameter, first element in the box, number of elements).
    """
    shape = placement.shape
    if 0 in shape:
        return
    inner = len(shape)  # the box spans all dims from here on, so they do not interrupt a range
    while inner and shape[inner - 1] == local_shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    length = prod(shape[outer:])
    for number, index in enumerate(product(*map(range, shape[:outer]))):
        first = 0
        for dim, size in enumerate(local_shape):
            inside = index[dim] if dim < outer else 0
            first = first * size + placement.local_start[dim] + inside
        yield first, number * length, length
