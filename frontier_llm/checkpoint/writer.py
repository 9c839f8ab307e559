"""Run the saves of one level, one after the other, on a thread of their own."""

import threading
from collections import deque
from collections.abc import Callable


class Writer:
    """A thread that calls functions in the order in which they were submitted.

    One thread submits and waits. The thread of this class ends when nothing is left to do.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._unfinished = 0
        self._is_running = False

    def submit(self, job: Callable[[], None]) -> None:
        """Call a function, which must not raise, after those submitted before."""
        with self._changed:
            self._jobs.append(job)
            self._unfinished += 1
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a submitted function has not returned."""
        with self._changed:
            return self._unfinished > 0

    def wait_below(self, limit: int, seconds: float | None = None) -> bool:
        """Wait until fewer than `limit` submitted functions have not returned.

        Args:
            limit: the number.
            seconds: longest wait; None = no limit.

        Returns:
            False if the wait has ended before.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished < limit, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_running = False
                    return
                job = self._jobs.popleft()
            try:
                job()
            finally:
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()
