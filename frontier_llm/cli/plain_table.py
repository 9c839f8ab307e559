"""Define the style of the tables that commands print."""

from collections.abc import Sequence
from typing import Literal

from rich.box import HORIZONTALS
from rich.table import Table


def plain_table(title: str, columns: Sequence[str]) -> Table:
    """Return a table without rows, with left-aligned title and caption and few lines."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=HORIZONTALS,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(column)
    return table


def table_of_numbers(name: str, columns: Sequence[str], *, left: Sequence[str] = ()) -> Table:
    """Return a table whose first column, which names the rows, folds on a narrow terminal.

    The headings of the other columns have a word per line; those in `left` are left-aligned.
    """
    table = plain_table("", ())
    table.add_column(name, overflow="fold")
    for heading in columns:
        justify: Literal["left", "right"] = "left" if heading in left else "right"
        table.add_column(heading.replace(" ", "\n"), justify=justify, no_wrap=True)
    return table
