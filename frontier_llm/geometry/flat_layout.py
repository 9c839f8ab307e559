"""Flat buffers of a unit: where each parameter lies, and how much padding follows.

Decayed parameters come first, so that the two groups of the optimizer are two contiguous ranges
of every interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FlatLayout:
    """Element ranges of a unit's parameters in its flat buffer."""

    starts: tuple[int, ...]
    """First element of each parameter, in the order given."""
    decayed: int
    """Elements [0, decayed) get weight decay."""
    used: int
    """Elements [0, used) belong to parameters; the rest is padding."""
    size: int
    """Elements of the buffer."""


def flat_layout(sizes: Sequence[int], decayed: Sequence[bool], multiple: int = 1) -> FlatLayout:
    """Lay parameters of `sizes` elements out in one buffer.

    Args:
        sizes: elements of each parameter.
        decayed: whether weight decay applies to it.
        multiple: the buffer's size is padded to a multiple of this.
    """
    starts = [0] * len(sizes)
    position = 0
    boundary = 0
    for wanted in (True, False):
        for index, (size, decays) in enumerate(zip(sizes, decayed, strict=True)):
            if decays is wanted:
                starts[index] = position
                position += size
        if wanted:
            boundary = position
    return FlatLayout(tuple(starts), boundary, position, -(-position // multiple) * multiple)
