"""What nothing beats both in memory and in speed: the Pareto front of a search."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Front(Generic[Item]):
    """Items by peak memory; each further one takes more bytes and fewer seconds."""

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self._seconds: list[float] = []
        self._items: list[Item] = []

    def beats(self, peak: int, seconds: float) -> bool:
        """Say whether an item takes no more bytes and no more seconds."""
        at = bisect_right(self._peaks, peak)
        return at > 0 and self._seconds[at - 1] <= seconds

    def add(self, peak: int, seconds: float, item: Item) -> None:
        """Take an item in, unless it is beaten, and let go of what it beats."""
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
