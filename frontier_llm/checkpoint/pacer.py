"""End copies of checkpoints, and keep them from disturbing training: a rate, or idle priority."""

import ctypes
import os
import platform
import threading
import time
from contextlib import suppress

from frontier_llm.errors import CheckpointError


class Cancellation:
    """A request to give up checkpoints that are being written; threads look for it often."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Make all later calls of `check` and `sleep` raise. Any thread may call this."""
        self._event.set()

    def check(self) -> None:
        """Raise a CheckpointError if the checkpoint was given up."""
        self.sleep(0)

    def sleep(self, seconds: float) -> None:
        """Sleep, or raise a CheckpointError if the checkpoint is given up."""
        if self._event.wait(seconds):
            raise CheckpointError("it was given up, because ranks were replaced")


_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of Linux's system call `ioprio_set`, by machine (man 2 ioprio_set)."""
_THIS_THREAD, _IDLE_CLASS = 1, 3 << 13


class Pacer:
    """Limits the bytes per second of one thread that copies files, until it is cancelled."""

    def __init__(self, bytes_per_second: float | None, cancellation: Cancellation) -> None:
        self._rate, self._next = bytes_per_second, 0.0
        self.cancellation = cancellation

    def wait(self, count: int) -> None:
        """Wait until `count` more bytes may be copied; raise a CheckpointError if given up."""
        seconds = 0.0
        if self._rate is not None:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + count / self._rate
            seconds = begin - now
        self.cancellation.sleep(seconds)

    def start_thread(self) -> None:
        """Give this thread idle priority for input and output, if there is no limit.

        Only some schedulers of Linux (BFQ) follow it. Elsewhere nothing changes.
        """
        number = _IOPRIO_SET.get(platform.machine())
        if self._rate is None and number is not None and os.name == "posix":
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).syscall(number, _THIS_THREAD, 0, _IDLE_CLASS)
