"""Define the transforms between one of our tensors and theirs: pairs of exact inverses.

Our tensors have megatron's layout. The fused projection of self attention contains group after
group of heads, and each group its query heads, its key head and its value head. Tensor parallelism
can therefore cut the projection between groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Transform(ABC):
    """A function from one of our tensors to theirs, and its inverse."""

    @abstractmethod
    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return their tensors for one of ours."""

    @abstractmethod
    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return our tensor for theirs."""


class Same(Transform):
    """The tensor is the same on both sides."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor unchanged."""
        return (ours,)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return the tensor unchanged."""
        (only,) = theirs
        return only


class Transposed(Transform):
    """Our matrix is [out, in], theirs [in, out], as in GPT-2's Conv1D."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return the transposed tensor."""
        return (ours.t(),)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return the transposed tensor."""
        (only,) = theirs
        return only.t()


@dataclass(frozen=True)
class Heads(Transform):
    """Our tensor contains the rows of several projections, group of heads after group."""

    groups: int
    """Number of groups of heads that share a key and a value head."""
    rows: tuple[int, ...]
    """Rows of one group in each projection: query heads * head width, head width, head width."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Split our tensor into projections."""
        grouped = ours.reshape(self.groups, sum(self.rows), *ours.shape[1:])
        return tuple(part.flatten(0, 1) for part in grouped.split(self.rows, dim=1))

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Join the rows of each group."""
        parts = [
            part.reshape(self.groups, rows, *part.shape[1:])
            for part, rows in zip(theirs, self.rows, strict=True)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class JoinedHeads(Transform):
    """As `Heads`, but theirs is one transposed matrix: all queries, all keys, all values."""

    heads: Heads

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Split our tensor into projections, join them and transpose."""
        return (torch.cat(self.heads.to_theirs(ours)).t(),)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Transpose, and join the rows of each group."""
        (joined,) = theirs
        sizes = [self.heads.groups * rows for rows in self.heads.rows]
        return self.heads.to_ours(joined.t().split(sizes))
