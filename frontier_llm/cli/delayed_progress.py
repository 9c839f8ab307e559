"""Show a progress bar only if the work takes longer than a second."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress

DELAY_SECONDS = 1.0
"""Seconds of work before the bar appears."""


class DelayedProgress:
    """A progress bar that appears after DELAY_SECONDS and disappears at the end of its context."""

    def __init__(self, console: Console) -> None:
        """Start the delay; the bar will appear on `console`."""
        self._console, self._start = console, time.monotonic()
        self._bar: Progress | None = None

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
        """Show the progress.

        Args:
            description: what is being done.
            share_done: completed share of the work, from 0 to 1.
        """
        if self._bar is None:
            if time.monotonic() - self._start < DELAY_SECONDS:
                return
            self._bar = Progress(transient=True, console=self._console, auto_refresh=False)
            self._task = self._bar.add_task(description, total=1.0)
            self._bar.start()
        self._bar.update(self._task, description=description, completed=share_done)
        self._bar.refresh()
