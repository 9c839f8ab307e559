"""Print numbers and progress of the commands of this package."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from rich import get_console
from rich.table import Table

from frontier_llm.cli.console import DelayedProgress, plain_table

T = TypeVar("T")


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


def tracked(items: Sequence[T], heading: str, description: str) -> Iterator[T]:
    """Yield items, and show how many of them are done: a bar, or lines without a terminal."""
    with DelayedProgress(get_console(), lines=True, heading=heading) as progress:
        for number, item in enumerate(items):
            progress(description, number / len(items))
            yield item
