"""Where the elements of a shard lie in the global model: runs of boxes, and runs as boxes.

A shard is a run of the flattened *local* parameter. What a placement covers of it is a run of the
placement's box as well, since both count row by row: so a piece of a checkpoint is "elements
[first, first + count) of this box of that tensor", which no longer knows of any layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from frontier_llm.protocols import Placement

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Elements of a shard that follow each other in the box of a placement as well."""

    placement: Placement
    """The box."""
    first: int
    """Its first element in the flattened box."""
    count: int
    """Elements."""
    offset: int
    """Its first element in the shard."""


def covered(
    placements: Sequence[Placement], local_shape: Sequence[int], start: int, count: int
) -> Iterator[Part]:
    """Yield what placements cover of a run; what none covers is padding.

    Args:
        placements: of the parameter.
        local_shape: of the parameter.
        start: first element of the run in the flattened parameter.
        count: elements of the run.
    """
    for placement in placements:
        for local_first, box_first, length in _spans(placement, local_shape):
            first = max(start, local_first)
            stop = min(start + count, local_first + length)
            if first < stop:
                box_start = box_first + first - local_first
                yield Part(placement, box_start, stop - first, first - start)


def blocks(shape: Sequence[int], first: int, count: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a run of a flattened box into boxes that lie one behind the other in the run.

    There are at most 2 d - 1 of them in d dims: the end of a row, whole rows, the beginning of one.

    Args:
        shape: of the box; d dims.
        first: first element of the run.
        count: elements of the run, at least one.

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
        for start, extent in blocks(shape[1:], within, length):
            yield (row, *start), (1, *extent)
        position += length


def _spans(placement: Placement, local_shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous ranges of the flattened parameter that a box covers.

    Yields:
        (first element in the parameter, first element in the box, elements).
    """
    shape = placement.shape
    if 0 in shape:
        return
    inner = len(shape)  # the dims from here on are whole: they do not interrupt a range
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
