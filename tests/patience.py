"""How long a test waits before it calls something a hang: one place for all limits of time.

A limit only ends what would never end. So it is several times as long as a quiet machine needs,
and longer while other programs use the machine; it is asked again and again, because they may
start later. What a test asserts is the order of events, or counted work, never a time.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
MARGIN = 4
"""Limits are so many times as long as what they are given."""
_POLL_SECONDS = 0.01
_LOAD = Path("/proc/loadavg")


def patience() -> float:
    """Return by what limits are multiplied now: more if processes wait for the cores.

    The average load of a minute is that of the past: it is small when a busy minute begins.
    """
    load = os.getloadavg()[0]
    with suppress(OSError):  # the fourth field begins with the number of threads that can run now
        load = max(load, int(_LOAD.read_text().split()[3].partition("/")[0]))
    return MARGIN * max(1.0, load / len(os.sched_getaffinity(0)))


def patient(seconds: float) -> float:
    """Return the limit, in seconds, of what takes a quiet machine at most so many seconds."""
    return seconds * patience()


class Limit:
    """A limit of what takes a quiet machine at most so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._started > patient(self._seconds)


def wait_until(
    condition: Callable[[], Result],
    what: str | Callable[[], str] = "the condition",
    seconds: float = 30,
) -> Result:
    """Wait for the first true result of a condition, and return it.

    Raises:
        AssertionError: the limit is over; names `what` was waited for.
    """
    limit = Limit(seconds)
    while not (result := condition()):
        if limit.is_over:
            raise AssertionError(f"timed out waiting for {what() if callable(what) else what}")
        time.sleep(_POLL_SECONDS)
    return result


def count_calls(function: Callable[[], Any]) -> int:
    """Return how many functions a function calls: its work, which no other program changes."""
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
