"""Print tables and progress: what all commands share."""

import os
import re
import time
from collections.abc import Callable, Sequence

from rich.box import HORIZONTALS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

WIDTH = 200
"""Characters per line of output to files and pipes. Rich would assume 80 and cut numbers off."""
DELAY_SECONDS = 1.0
"""Seconds of work before a progress bar appears."""
LINE_SECONDS = 10.0
"""Seconds between two lines about a stage if the output is not a terminal."""


def wide_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console of the width of $COLUMNS or the terminal, or of WIDTH without both."""
    console = Console(stderr=stderr, highlight=highlight)
    if console.is_terminal or re.fullmatch("[1-9][0-9]*", os.environ.get("COLUMNS", "")):
        return console
    return Console(stderr=stderr, highlight=highlight, width=WIDTH)


def plain_table(title: str, columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """Return a table without rows, with left-aligned title and caption and few lines.

    The columns in `right` are right-aligned.
    """
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
        table.add_column(column, justify="right" if column in right else "left")
    return table


class DelayedProgress:
    """A progress bar that appears after DELAY_SECONDS and disappears at the end of its context.

    With `lines` it begins at once, and prints a line per stage and per LINE_SECONDS if the console
    is not a terminal. `heading` is the first word of these lines, `clock` the time in seconds.
    """

    def __init__(
        self,
        console: Console,
        *,
        lines: bool = False,
        heading: str = "corpus",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._clock, self._heading = console, clock, heading
        self._start = clock() - (DELAY_SECONDS if lines else 0.0)
        self._bar: Progress | None = None
        self._prints_lines = lines and not console.is_terminal
        self._last_line = ("", -LINE_SECONDS)

    def __enter__(self) -> "DelayedProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, description: str, share_done: float) -> None:
        """Show what is being done, and the share of it that is complete, from 0 to 1."""
        if self._bar is None:
            if self._clock() - self._start < DELAY_SECONDS:
                return
            if self._prints_lines:
                stage, printed = self._last_line
                if description != stage or self._clock() - printed >= LINE_SECONDS:
                    self._last_line = (description, self._clock())
                    share = f" {share_done:.0%}" if description == stage else ""
                    print_line(self._heading, f"{description}{share}")
                return
            self._bar = Progress(transient=True, console=self._console, auto_refresh=False)
            self._task = self._bar.add_task(description, total=1.0)
            self._bar.start()
        self._bar.update(self._task, description=description, completed=share_done)
        self._bar.refresh()


def print_line(heading: str, text: str) -> None:
    """Print a line like those of the log of a run, before there is a log."""
    print(f"{time.strftime('%H:%M:%S')}  {heading:<10} {text}", flush=True)
