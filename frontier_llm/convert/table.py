"""Define which of our tensors corresponds to which of theirs, and the transforms between them.

"Our" tensors are those of frontier_llm, "their" tensors those of Hugging Face. Each transform has
an exact inverse. Our tensors have Megatron's layout: the projections of self-attention are fused
into one matrix. A *group of heads* consists of the query heads that share a key and a value head.
The matrix contains the rows of the first group, then those of the second group and so on. The rows
of a group are those of its query heads, its key head and its value head, in this order. Tensor
parallelism can therefore divide the matrix between groups.

The rows of a layer's table are written once, with `{n}` in place of the layer's number. `unfold`
repeats them for all layers of a model. A tensor of ours or of theirs that has no row is an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.errors import DataError


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


Shape = tuple[int, ...]
SAME = Same()


@dataclass(frozen=True)
class Row:
    """One of our tensors, the corresponding tensors of theirs, and the transform between them."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME


def unfold(rows: Iterable[Row], layers: Iterable[int], first: int = 0) -> list[Row]:
    """Repeat the rows of a layer for several layers, with our number in place of `{n}`.

    `first` is our number of the layer that they number 0.
    """
    return [
        Row(
            row.ours.format(n=layer),
            tuple(name.format(n=layer - first) for name in row.theirs),
            row.transform,
        )
        for layer in layers
        for row in rows
    ]


def select(rows: Sequence[Row], shapes: Mapping[str, Shape]) -> list[Row]:
    """Return the rows that a model needs, in the order of its parameters.

    Some rows of a family are only for other variants, such as untied heads.
    """
    by_name = {row.ours: row for row in rows}
    if missing := [name for name in shapes if name not in by_name]:
        raise DataError(
            f"the conversion has no row for {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "\n  do: add a row to the family in frontier_llm/convert"
        )
    return [by_name[name] for name in shapes]


def surplus_names(rows: Sequence[Row], found: Iterable[str]) -> list[str]:
    """Return the names of the tensors in their folder that have no row in the table."""
    names, wanted = set(found), {name for row in rows for name in row.theirs}
    if missing := sorted(wanted - names):
        raise DataError(f"the model lacks {missing[0]} ({len(missing)} tensors in all)")
    return sorted(names - wanted)
