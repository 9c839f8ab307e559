"""Where the flat buffer of a unit is divided into the intervals that ranks store.

The intervals of a buffer usually have equal lengths. An optimizer such as Muon updates whole
matrices, so that no interval may end inside a matrix. Then the *bounds* of the optimizer intervals
are chosen by `whole_bounds`, and their lengths differ: on some ranks a unit has no elements at all.
Over all units of a rank, the numbers of elements are nearly equal. The intervals of parameters and
gradients are unions of neighbouring optimizer intervals, as they are with equal lengths.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from frontier_llm.geometry.partition import Factors, Interval


@dataclass(frozen=True)
class Cut:
    """The intervals of the flat buffer of one unit."""

    factors: Factors
    size: int
    """Number of elements of the buffer, padding included."""
    bounds: tuple[int, ...] = ()
    """First element of each optimizer interval, in the order of the buffer, and at last `size`;
    empty = equal intervals."""

    def interval(self, rank: int, ranks: int) -> Interval:
        """Return the interval of a data rank in the buffer, divided over `ranks` ranks.

        The arguments are those of `Factors.interval`. If intervals differ in length, `ranks` is at
        most the factor of the optimizer states.
        """
        if not self.bounds:
            return self.factors.interval(self.size, rank, ranks)
        first, count = self.factors.interval(self.factors.optimizer, rank, ranks)
        start = self.bounds[first]
        return Interval(start, self.bounds[first + count] - start)

    def parts(self, rank: int, whole: int, parts: int) -> tuple[int, ...]:
        """Return where the interval of a data rank is divided into smaller intervals.

        Args:
            rank: data rank.
            whole: number of ranks over which the buffer is divided into intervals; 1 = not at all.
            parts: number of ranks over which it is divided into the smaller intervals.

        Returns:
            The first element of each smaller interval, counted from the start of the interval, and
            the length of the interval. Empty if the smaller intervals have equal lengths.
        """
        if not self.bounds:
            return ()
        first, count = self.factors.interval(self.factors.optimizer, rank, whole)
        bounds = self.bounds[first : first + count + 1 : self.factors.optimizer // parts]
        return tuple(bound - bounds[0] for bound in bounds)


@lru_cache(maxsize=64)
def whole_bounds(
    units: tuple[tuple[tuple[int, ...], int], ...], parts: int
) -> tuple[tuple[int, ...], ...]:
    """Divide buffers into intervals that do not end inside a matrix.

    Buffer by buffer, the matrices are given to ranks in the order of the intervals. The first ranks
    take as many as they can below a limit on the elements of a rank, which is as low as possible.

    Args:
        units: for each buffer, the first element of each matrix that stays whole, and the number
            of elements of the buffer, padding included. What follows the last matrix stays with it.
            Buffers without such a matrix have equal intervals.
        parts: number of intervals per buffer.

    Returns:
        Per buffer: `Cut.bounds`.
    """
    loads, found = [0] * parts, list[tuple[int, ...]]()
    for starts, size in units:
        borders = (*starts, size)
        if not starts:
            found.append(())
            continue
        low, high = 0, max(loads) + size
        while low < high:
            limit = (low + high) // 2
            is_enough = _filled(borders, loads, limit)[-1] == size
            low, high = (low, limit) if is_enough else (limit + 1, high)
        bounds = _filled(borders, loads, low)
        loads = [
            load + end - start for load, (start, end) in zip(loads, pairwise(bounds), strict=False)
        ]
        found.append(tuple(bounds))
    return tuple(found)


def _filled(borders: tuple[int, ...], loads: list[int], limit: int) -> list[int]:
    """Return the bounds of a buffer if each rank takes as much as it can below a limit.

    Args:
        borders: where the buffer may be divided, from its first element to its size.
        loads: per rank, the elements that it has of other buffers.
        limit: the limit. If it is too low, the last bound is not the size of the buffer.
    """
    bounds, index = [0], 0
    for load in loads:
        while index + 1 < len(borders) and load + borders[index + 1] - bounds[-1] <= limit:
            index += 1
        bounds.append(borders[index])
    return bounds
