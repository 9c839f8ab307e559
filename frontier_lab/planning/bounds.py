"""Bounds with which a search excludes layouts before it predicts them."""

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from frontier_llm.geometry.partition import Factors
from frontier_llm.planner.block import Activations, stage_activations
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.memory import device_bytes, known_states

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

    def room(self, seconds: float) -> float:
        """Return the peak bytes from which on the front beats what takes `seconds`."""
        fast = bisect_left(self._seconds, -seconds, key=operator.neg)
        return self._peaks[fast] if fast < len(self._peaks) else math.inf

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


def least_activations(candidate: Candidate) -> tuple[Activations, ...]:
    """Return lower bounds on `kinds_activations`, without the lists of split backward passes."""
    return tuple(
        stage_activations(candidate, kind.first, kind, is_least=True)
        for kind in candidate.stages.kinds
    )


def peak_bytes(
    candidate: Candidate, activations: Sequence[Activations], limit: float = math.inf
) -> int:
    """Return the total of `fullest_of`, or if that is at least `limit`, any bound that also is."""
    by_stage, peak = candidate.stages.by_stage, 0
    for kept in activations:
        of_stage = device_bytes(candidate, by_stage[kept.stage], kept)
        peak = max(peak, sum(of_stage.values()))
        if peak >= limit:
            break
    return peak


def least_bytes(candidate: Candidate, factors: Factors, activations: Sequence[Activations]) -> int:
    """Return a lower bound on `peak_bytes` with other factors: states and kept activations."""
    by_stage = candidate.stages.by_stage
    return max(
        sum(known_states(candidate, by_stage[kept.stage], factors).values()) + kept.kept
        for kept in activations
    )
