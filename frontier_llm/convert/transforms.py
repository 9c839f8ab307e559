"""Define the transforms between one of our tensors (frontier_llm) and theirs (Hugging Face).

Each transform has an exact inverse. Our tensors have Megatron's layout: the projections of
self-attention are fused into one matrix. A *group of heads* consists of the query heads that share
a key and a value head. The matrix contains the rows of the first group, then those of the second
group and so on. The rows of a group are those of its query heads, its key head and its value head,
in this order. Tensor parallelism can therefore divide the matrix between groups.
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
    """Leaves a tensor that is the same on both sides unchanged."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor unchanged."""
        return (ours,)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return the tensor unchanged."""
        (only,) = theirs
        return only


class Transposed(Transform):
    """Transposes a matrix: ours is [out, in], theirs is [in, out], as in GPT-2's Conv1D."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return the transposed tensor."""
        return (ours.t(),)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return the transposed tensor."""
        (only,) = theirs
        return only.t()


@dataclass(frozen=True)
class Heads(Transform):
    """Splits our fused tensor, which is ordered by group of heads, into their projections."""

    groups: int
    """Number of groups of heads."""
    rows: tuple[int, ...]
    """Number of rows per group in each of their projections, for example (query heads per group *
    head width, head width, head width)."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Split the rows of each group by projection."""
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
    """Converts our fused tensor to a single transposed matrix of theirs.

    Their matrix contains all queries, then all keys, then all values.
    """

    heads: Heads
    """The transform between our tensor and three separate projections."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Split our tensor into projections, join them and transpose."""
        return (torch.cat(self.heads.to_theirs(ours)).t(),)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Transpose, and join the rows of each group."""
        (joined,) = theirs
        sizes = [self.heads.groups * rows for rows in self.heads.rows]
        return self.heads.to_ours(joined.t().split(sizes))
