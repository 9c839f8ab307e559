"""Define the table of a family: which of our tensors corresponds to which of their tensors.

"Our" tensors are those of frontier_llm, "their" tensors those of Hugging Face. The rows of a layer
are written once, with `{n}` in place of the layer's number. `unfold` repeats them for all layers of
a model. A tensor of ours or of theirs that has no row is an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from frontier_llm.convert.transforms import Same, Transform
from frontier_llm.errors import DataError

Shape = tuple[int, ...]
SAME = Same()
"""The transform of tensors that are equal on both sides."""


@dataclass(frozen=True)
class Row:
    """One of our tensors, the corresponding tensors of theirs, and the transform between them."""

    ours: str
    """Name of our tensor."""
    theirs: tuple[str, ...]
    """Names of their tensors."""
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

    Raises:
        DataError: a parameter has no row.
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
    """Return the names of the tensors in their folder that have no row in the table.

    Raises:
        DataError: the folder lacks a tensor of the table.
    """
    names, wanted = set(found), {name for row in rows for name in row.theirs}
    if missing := sorted(wanted - names):
        raise DataError(f"the model lacks {missing[0]} ({len(missing)} tensors in all)")
    return sorted(names - wanted)
