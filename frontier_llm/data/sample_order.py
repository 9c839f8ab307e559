"""The order in which a run reads the windows of a stream of tokens, also if their length changes.

The windows of an epoch are read in a random order. If their length changes in the middle of an
epoch, the windows that are left are read on in the same order, as one sequence of tokens that is
cut at the new length. A sample is then a part of an old window, or consists of parts of several.
The next epoch reads windows of the new length. So in an epoch no token is an input twice, and the
tokens left unread are fewer than one sample of the last length (besides the rest of the stream
after its last window).

Each sample is computed from its index and the segments alone. A checkpoint stores the segments.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from frontier_llm.data.permutation import permute

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LengthSegment:
    """Consecutive samples of the same length."""

    first_sample: int
    tokens: int
    keeps_all: bool = False
    """Whether samples are read that predict no token, as older versions did."""


def resumed_lengths(
    history: Sequence[Mapping[str, Any]], next_sample: int, tokens: int
) -> list[LengthSegment]:
    """Return the segments of a run that reads samples of `tokens` tokens from `next_sample` on.

    `history` are the segments of the checkpoint, as plain JSON.
    """
    kept = [LengthSegment(**s) for s in history if s["first_sample"] < max(next_sample, 1)]
    if kept[-1].tokens != tokens:
        kept.append(LengthSegment(next_sample, tokens))
    return kept


class Kept:
    """The numbers below `count` without some that are left out, in ascending order."""

    def __init__(self, count: int, left_out: Numbers) -> None:
        self.left_out = len(left_out)
        self._count, self._shifted = count - len(left_out), left_out - np.arange(len(left_out))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index + int(np.searchsorted(self._shifted, index, side="right"))


class _Part(NamedTuple):
    """What a segment reads: first the rest of an epoch, then epochs of its own."""

    first_sample: int
    length: int
    epoch: int
    """The epoch of the rest."""
    base: int
    """Length of the windows whose order the rest has."""
    cursor: int
    """Tokens of this order that earlier segments have read."""


class SampleOrder:
    """Maps each sample of a run to ranges of tokens.

    `windows` returns the windows of any length, and `key` the key of the random order of an epoch;
    without it epochs are in order.
    """

    def __init__(
        self, length: int, windows: Callable[[int], Kept], key: Callable[[int], int] | None
    ) -> None:
        self._windows, self._key = windows, key
        self._parts = [_Part(0, length, 0, length, 0)]

    def change(self, first_sample: int, length: int) -> None:
        """Give the samples from `first_sample` on another length; earlier ones do not change."""
        epoch, base, cursor = self._place(self._parts[-1], first_sample, is_end=True)
        self._parts.append(_Part(first_sample, length, epoch, base if cursor else length, cursor))

    def locate(self, index: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the epoch of a sample, and (first token, number of tokens) of its ranges."""
        part = self._parts[bisect_right(self._parts, index, key=lambda p: p.first_sample) - 1]
        epoch, base, first = self._place(part, index)
        windows, last, found = self._windows(base), first + part.length, list[tuple[int, int]]()
        while first < last:
            position, offset = divmod(first, base)
            if self._key is not None:
                position = permute(position, len(windows), self._key(epoch))
            start, size = windows[position] * base + offset, min(last - first, base - offset)
            first += size
            if found and sum(found[-1]) == start:  # it follows in the stream, too
                start, size = found[-1][0], found.pop()[1] + size
            found.append((start, size))
        return epoch, found

    def _place(self, part: _Part, index: int, *, is_end: bool = False) -> tuple[int, int, int]:
        """Return the epoch of a sample, the length of its windows, and its place in their order.

        With `is_end` the place is where the samples before it end.
        """
        number = index - part.first_sample
        rest = (len(self._windows(part.base)) * part.base - part.cursor) // part.length
        if number < rest + is_end:
            return part.epoch, part.base, part.cursor + number * part.length
        epochs, position = divmod(number - rest, len(self._windows(part.length)))
        return part.epoch + 1 + epochs, part.length, position * part.length
