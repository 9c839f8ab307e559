"""Run functions one after the other on a thread of their own."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_IDLE_SECONDS = 10.0
"""How long a thread waits for work before it ends. A new thread is slow to start while all cores
are busy, and the caller waits until it runs."""

_NICENESS = 10
"""Added to the priority value of a thread, so that it gets a tenth of a core that training needs,
and all of a core that is idle."""


class JobThread:
    """A thread that calls functions in the order in which they were submitted.

    One thread submits and waits. The thread of this class ends when it has been idle for a while.
    If it `yields`, it has a lower priority than training.
    """

    def __init__(self, name: str, *, yields: bool = True) -> None:
        self._name, self._yields = name, yields
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._unfinished = 0
        self._is_running = False

    def submit(self, job: Callable[[], None]) -> None:
        """Call a function, which must not raise, after those submitted before."""
        with self._changed:
            self._jobs.append(job)
            self._unfinished += 1
            self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a submitted function has not returned."""
        with self._changed:
            return self._unfinished > 0

    def wait_below(self, limit: int, seconds: float | None = None) -> bool:
        """Wait until fewer than `limit` functions are unfinished; return False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished < limit, seconds)

    def _run(self) -> None:
        if self._yields:
            _yield_to_training()
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._jobs, _IDLE_SECONDS):
                    self._is_running = False
                    return
                job = self._jobs.popleft()
            try:
                job()
            finally:
                del job  # it may hold states and host memory
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()


def _yield_to_training() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, own + _NICENESS)
