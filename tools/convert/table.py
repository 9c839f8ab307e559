"""The table of a family: which tensors of ours are which of theirs.

A row is written once for all layers, `{n}` in the place of the layer's number, and unfolded for a
model. A tensor that no row names is an error, on either side.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from frontier_llm.errors import DataError
from tools.convert.transforms import Same, Transform

Shape = tuple[int, ...]
SAME = Same()


@dataclass(frozen=True)
class Row:
    """One tensor of ours."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME


def unfold(rows: Iterable[Row], layers: Iterable[int], first: int = 0) -> list[Row]:
    """Write rows out for layers.

    Args:
        rows: with `{n}` in their names.
        layers: of ours.
        first: the layer of ours that is their number 0.
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
        rows: of its family; some are for variants of it.
        shapes: of its parameters, by our names.

    Raises:
        DataError: a parameter has no row.
    """
    by_name = {row.ours: row for row in rows}
    if missing := [name for name in shapes if name not in by_name]:
        raise DataError(
            f"the conversion knows no place for {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "\n  do: add a row to tools/convert/families.py"
        )
    return [by_name[name] for name in shapes]


def check_names(rows: Sequence[Row], found: Iterable[str], unused: Sequence[str]) -> None:
    """Refuse a folder of theirs that lacks a tensor, or has one that no row takes.

    Args:
        rows: of the model.
        found: names in the folder.
        unused: endings of names that carry nothing: buffers, and second names of tied weights.

    Raises:
        DataError: naming the first.
    """
    names, wanted = set(found), {name for row in rows for name in row.theirs}
    if missing := sorted(wanted - names):
        raise DataError(f"the model lacks {missing[0]} ({len(missing)} tensors in all)")
    spare = sorted(name for name in names - wanted if not name.endswith(tuple(unused)))
    if spare:
        raise DataError(
            f"{spare[0]} has no place in ours ({len(spare)} tensors in all): converting would "
            "lose it\n  do: add a row to tools/convert/families.py, if our model computes with it"
        )
