"""Show the progress of work that takes longer than a second."""

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from rich import get_console
from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")
DELAY_SECONDS = 1.0
"""Seconds of work before the bar appears."""
LINE_SECONDS = 10.0
"""Seconds between two lines about a stage if the output is not a terminal."""


class DelayedProgress:
    """A progress bar that appears after DELAY_SECONDS and disappears at the end of its context."""

    def __init__(
        self,
        console: Console,
        *,
        lines: bool = False,
        heading: str = "corpus",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the delay.

        Args:
            lines: whether to begin at once, and to print a line per stage and per LINE_SECONDS if
                `console` is not a terminal.
            heading: first word of these lines.
        """
        self._console, self._clock, self._heading = console, clock, heading
        self._start = clock() - (DELAY_SECONDS if lines else 0.0)
        self._bar: Progress | None = None
        self._prints_lines = lines and not console.is_terminal
        self._last_line = ("", -LINE_SECONDS)

    def __enter__(self) -> "DelayedProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, description: str, share_done: float) -> None:
        """Show the progress."""
        if self._bar is None:
            if self._clock() - self._start < DELAY_SECONDS:
                return
            if self._prints_lines:
                stage, printed = self._last_line
                if description != stage or self._clock() - printed >= LINE_SECONDS:
                    self._last_line = (description, self._clock())
                    print_line(self._heading, f"{description} {share_done:.0%}")
                return
            self._bar = Progress(transient=True, console=self._console, auto_refresh=False)
            self._task = self._bar.add_task(description, total=1.0)
            self._bar.start()
        self._bar.update(self._task, description=description, completed=share_done)
        self._bar.refresh()


def tracked(items: Sequence[T], heading: str, description: str) -> Iterator[T]:
    """Yield items, and show how many of them are done: a bar, or lines without a terminal."""
    with DelayedProgress(get_console(), lines=True, heading=heading) as progress:
        for number, item in enumerate(items):
            progress(description, number / len(items))
            yield item


def print_line(heading: str, text: str) -> None:
    """Print a line like those of the log of a run, before there is a log."""
    print(f"{time.strftime('%H:%M:%S')}  {heading:<10} {text}", flush=True)
