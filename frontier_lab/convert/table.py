"""Define which of our tensors corresponds to which of theirs, and the transforms between them.

Each transform has an exact inverse. Our tensors have Megatron's layout: the projections of self-
attention are fused into one matrix. A *group of heads* consists of the query heads that share a key
and a value head. The matrix contains the rows of the first group, then those of the second group
and so on. The rows of a group are those of its query heads, its key head and its value head, in
this order. Tensor parallelism can therefore divide the matrix between groups.

A tensor of ours or of theirs that has no row is an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.errors import DataError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """A function from one of our tensors to theirs, and its inverse."""

    to_theirs: Callable[[Tensor], tuple[Tensor, ...]]
    to_ours: Callable[[Sequence[Tensor]], Tensor]


SAME = Transform(lambda ours: (ours,), lambda theirs: theirs[0])
TRANSPOSED = Transform(lambda ours: (ours.t(),), lambda theirs: theirs[0].t())
"""Our matrix is [out, in], theirs is [in, out], as in GPT-2's Conv1D."""


def split_heads(groups: int, rows: tuple[int, ...], *, joined: bool = False) -> Transform:
    """Return the transform of our fused tensor into their projections.

    Each group of heads has `rows` rows of each projection, for example (query heads per group *
    head width, head width, head width). If theirs are joined, they have a single transposed matrix
    of all queries, then all keys, then all values.
    """

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        grouped = ours.reshape(groups, sum(rows), *ours.shape[1:])
        projections = tuple(part.flatten(0, 1) for part in grouped.split(rows, dim=1))
        return (torch.cat(projections).t(),) if joined else projections

    def to_ours(theirs: Sequence[Tensor]) -> Tensor:
        projections = theirs[0].t().split([groups * n for n in rows]) if joined else theirs
        parts = [
            part.reshape(groups, n, *part.shape[1:])
            for part, n in zip(projections, rows, strict=True)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)

    return Transform(to_theirs, to_ours)


@dataclass(frozen=True)
class Row:
    """One of our tensors, the corresponding tensors of theirs, and the transform between them."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME


def expanded(name: str) -> list[str]:
    """Return the names that a name with braces stands for.

    >>> expanded("attention.{q,k}_proj")
    ['attention.q_proj', 'attention.k_proj']
    """
    before, _, rest = name.partition("{")
    words, _, after = rest.partition("}")
    return [f"{before}{word}{after}" for word in words.split(",")]


def select(rows: Iterable[Row], shapes: Mapping[str, Shape]) -> list[Row]:
    """Return the rows that a model needs, in the order of its parameters.

    Some rows of a family are only for other variants, such as untied heads.
    """
    by_name = {row.ours: row for row in rows}
    if missing := [name for name in shapes if name not in by_name]:
        raise DataError(
            f"the conversion has no row for {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "\n  do: add a row to the family in frontier_lab/convert"
        )
    return [by_name[name] for name in shapes]


def surplus_names(rows: Sequence[Row], found: Iterable[str]) -> list[str]:
    """Return the names of the tensors in their folder that have no row in the table."""
    names, wanted = set(found), {name for row in rows for name in row.theirs}
    if missing := sorted(wanted - names):
        todo = "restore its files and config.json from where the model is from"
        if missing == ["lm_head.weight"]:  # transformers 5 ties the head if the tensor is absent
            todo = "convert a model with a head of its own: here it is the embedding, or is lost"
        raise DataError(
            f"the model lacks {missing[0]} ({len(missing)} tensors in all)\n  do: {todo}"
        )
    return sorted(names - wanted)
