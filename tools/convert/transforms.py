"""How one tensor of ours becomes theirs, and the other way round: pairs of exact inverses.

Ours are as megatron computes with them: of queries, keys and values, the rows of one group of heads
stand together (its query heads, its key head, its value head), so that tensor ranks can cut them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Transform(ABC):
    """A pair of inverses."""

    @abstractmethod
    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return what takes the place of one tensor of ours."""

    @abstractmethod
    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return ours."""


class Same(Transform):
    """Equal on both sides."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return it as it is."""
        return (ours,)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return it as it is."""
        (only,) = theirs
        return only


class Transposed(Transform):
    """[out, in] here, [in, out] there (GPT-2's Conv1D); vectors are equal."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Transpose."""
        return (ours.t(),)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Transpose."""
        (only,) = theirs
        return only.t()


@dataclass(frozen=True)
class Heads(Transform):
    """Several projections, of which ours has the rows of each group of heads together."""

    groups: int
    """Of heads that share a key and a value head."""
    rows: tuple[int, ...]
    """Rows of one group in each projection: query heads * d, d, d."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Take the projections apart."""
        grouped = ours.reshape(self.groups, sum(self.rows), *ours.shape[1:])
        return tuple(part.flatten(0, 1) for part in grouped.split(self.rows, dim=1))

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Put the rows of each group together."""
        parts = [
            part.reshape(self.groups, rows, *part.shape[1:])
            for part, rows in zip(theirs, self.rows, strict=True)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class JoinedHeads(Transform):
    """The same where theirs is one matrix, all queries, all keys, all values, transposed."""

    heads: Heads

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Take the projections apart, join them, transpose."""
        return (torch.cat(self.heads.to_theirs(ours)).t(),)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Transpose, and put the rows of each group together."""
        (joined,) = theirs
        sizes = [self.heads.groups * rows for rows in self.heads.rows]
        return self.heads.to_ours(joined.t().split(sizes))
