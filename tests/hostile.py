"""Values that a damaged or forged file may have, and a limit of the time that a reader takes."""

import copy
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NUMBERS: list[Any] = [-1, 0, 1, 2**31, 2**63, 10**30, math.nan, "x", None]
NAMES = ["../x", "/etc/passwd", "a\0b", "\x1b[31mred"]


@contextmanager
def cpu_seconds(limit: float) -> Iterator[None]:
    """Fail if the block takes more time of the processor; other programs do not count."""

    def fail(*_: object) -> None:
        raise AssertionError(f"it takes more than {limit} s of the processor")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each number and text in nested JSON; of a list only the first two items."""
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content[:2])
        for key, value in items:
            yield from leaves(value, (*path, key))
    else:
        yield path


def at(content: Any, path: tuple[Any, ...]) -> Any:
    """Return the part of nested JSON at a path."""
    for key in path:
        content = content[key]
    return content


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of nested JSON with another value at a path."""
    content = copy.deepcopy(content)
    at(content, path[:-1])[path[-1]] = value
    return content


def renamed(content: Any, path: tuple[Any, ...], name: str) -> Any:
    """Return a copy of nested JSON with another key at a path."""
    content = copy.deepcopy(content)
    place = at(content, path[:-1])
    place[name] = place.pop(path[-1])
    return content
