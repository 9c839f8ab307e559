"""Keep the Pareto front of memory and time: what no other layout beats in both."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ParetoFront(Generic[Item]):
    """Items in ascending order of peak memory and in descending order of step time.

    No item of the front is better than another one in both.
    """

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self._seconds: list[float] = []
        self._items: list[Item] = []

    def beats(self, peak: int, seconds: float) -> bool:
        """Whether an item of the front takes at most `peak` bytes and at most `seconds`."""
        smaller = bisect_right(self._peaks, peak)  # items with at most `peak` bytes
        return smaller > 0 and self._seconds[smaller - 1] <= seconds

    def add(self, peak: int, seconds: float, item: Item) -> None:
        """Add an item unless the front beats it, and remove the items that it beats."""
        if self.beats(peak, seconds):
            return
        start = end = bisect_left(self._peaks, peak)
        while end < len(self._peaks) and self._seconds[end] >= seconds:
            end += 1
        self._peaks[start:end] = [peak]
        self._seconds[start:end] = [seconds]
        self._items[start:end] = [item]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)
