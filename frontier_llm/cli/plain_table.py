"""Define the style of the tables that commands print."""

from collections.abc import Sequence

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
