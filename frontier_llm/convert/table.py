"""Define the table of a family: which of our tensors corresponds to which of their tensors.

A row is written once for all layers, with `{n}` for the number of the layer, and then expanded for
a model. A tensor without a row is an error on both sides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from frontier_llm.convert.transforms import Same, Transform
from frontier_llm.errors import DataError

Shape = tuple[int, ...]
SAME = Same()


@dataclass(frozen=True)
class Row:
    """One of our tensors, their tensors for it, and the transform between them."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME


def unfold(rows: Iterable[Row], layers: Iterable[int], first: int = 0) -> list[Row]:
    """Return the rows expanded for every layer.

    Args:
        rows: rows with `{n}` in the names.
        layers: numbers of our layers.
        first: number of our layer that is their layer 0.
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
    """Return the rows of a model's parameters, in the model's order.

    Args:
        rows: the table of the family; some rows are for variants of the model.
        shapes: shapes of the model's parameters by our names.

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


def check_names(rows: Sequence[Row], found: Iterable[str], unused: Sequence[str]) -> None:
    """Refuse a folder that lacks a tensor, or contains one that has no row.

    Args:
        rows: rows of the model.
        found: names of the tensors in their folder.
        unused: endings of names that are not needed: buffers, and second names of tied weights.

    Raises:
        DataError: the message names the first such tensor.
    """
    names, wanted = set(found), {name for row in rows for name in row.theirs}
    if missing := sorted(wanted - names):
        raise DataError(f"the model lacks {missing[0]} ({len(missing)} tensors in all)")
    spare = sorted(name for name in names - wanted if not name.endswith(tuple(unused)))
    if spare:
        raise DataError(
            f"{spare[0]} has no place in our model ({len(spare)} tensors in all): the conversion "
            "would lose it\n"
            "  do: add a row to the family in frontier_llm/convert if our model computes with it"
        )
