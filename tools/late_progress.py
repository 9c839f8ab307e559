"""A progress bar that comes only when something takes longer than a second."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress

PATIENCE_SECONDS = 1.0


class LateProgress:
    """Called with (what is being done, share done); leaves nothing behind on the screen."""

    def __init__(self, console: Console) -> None:
        self._console, self._start = console, time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> "LateProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, share_done: float) -> None:
        """Show how far it is."""
        if self._bar is None:
            if time.monotonic() - self._start < PATIENCE_SECONDS:
                return
            self._bar = Progress(transient=True, console=self._console, auto_refresh=False)
            self._task = self._bar.add_task(what, total=1.0)
            self._bar.start()
        self._bar.update(self._task, description=what, completed=share_done)
        self._bar.refresh()
