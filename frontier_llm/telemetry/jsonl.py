"""Write metrics.jsonl, the file of a run directory that has one JSON object per step.

Reports and benchmarks read the file through history.py.
"""

import contextlib
import errno
import io
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from frontier_llm.errors import TrainingError, file_failure
from frontier_llm.telemetry.metrics import StepMetrics
from frontier_llm.units import MIB, counted

_LOG = logging.getLogger(__name__)
LEDGER = "ledger.jsonl"
"""The file of the ledger in a run directory."""
METRICS_FILE = "metrics.jsonl"
LARGEST = 1e100
"""Larger finite numbers are damage. A chart could not show them."""
_LINE_BYTES = 4 * MIB
"""Largest length of a line."""
_TAIL_BYTES = 1 << 16
"""How much of the end of a file is read at first."""
_WAITING_LINES = 100_000
"""Lines in memory while a file cannot be written, about 50 MB. The oldest are lost beyond it."""


def parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if it is damaged, or incomplete after a crash."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    numbers = (value for value in row.values() if isinstance(value, int | float))
    return None if any(LARGEST < abs(number) < math.inf for number in numbers) else row


def read_rows(run_dir: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the lines as JSON, and the numbers, counted from 1, of those that are damaged.

    The last line does not count as damaged if it is incomplete.
    """
    path, rows, damaged, number = run_dir / METRICS_FILE, [], [], 0
    with path.open("rb") if path.is_file() else contextlib.nullcontext(io.BytesIO()) as file:
        while line := file.readline(_LINE_BYTES):
            number += 1
            row, is_whole = parse(line), line.endswith(b"\n")
            if row is not None:
                rows.append(row)
            elif is_whole or len(line) == _LINE_BYTES:
                damaged.append(number)
            while not is_whole and line:  # skip the rest of a line that is too long
                line = file.readline(_LINE_BYTES)
                is_whole = line.endswith(b"\n")
    return rows, damaged


def lines_from_end(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first; none if the file cannot be read.

    Reads no more than the caller wants, because a record may have gigabytes.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        cut_line = b""  # the end of a line that begins before `start`
        while start:
            size = min(start, max(_TAIL_BYTES, len(cut_line)))
            start = file.seek(start - size)
            cut_line, *lines = (file.read(size) + cut_line).split(b"\n")
            yield from reversed(lines)
        yield cut_line


def cut(run_dir: Path, step: int) -> None:
    """Shorten the file to the steps up to `step`, as a run does that resumes at this step.

    Everything from the first later step or the first damaged line on is removed. Raises a
    TrainingError if the file cannot be written; the message names it.
    """
    path = run_dir / METRICS_FILE
    try:
        with path.open("r+b") as file:
            end = 0
            for line in iter(partial(file.readline, _LINE_BYTES), b""):
                row = parse(line)
                if row is None or row["step"] > step or not line.endswith(b"\n"):
                    break
                end += len(line)
            file.truncate(end)
    except FileNotFoundError:
        return
    except OSError as error:
        raise TrainingError(file_failure(path, "written", error)) from None


class AppendedLines:
    """The lines that a run appends to a file.

    A line that cannot be written, for example because the file system is full, does not end the
    run: it and the later ones stay in memory until the file can be written again. When `append`
    returns, the operating system or this object has the line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque(maxlen=_WAITING_LINES)
        self._is_late = False

    @property
    def waiting(self) -> Sequence[bytes]:
        """The lines that could not be written yet, the oldest first."""
        return tuple(self._waiting)

    def append(self, line: str) -> None:
        """Append a line, which has no newline yet.

        Raises a TrainingError if the folder is gone.
        """
        self._waiting.append(line.encode() + b"\n")
        try:
            _append(self._path, b"".join(self._waiting))
        except FileNotFoundError as error:
            raise TrainingError(file_failure(self._path, "written", error)) from None
        except OSError as error:
            if not self._is_late:
                _LOG.warning(
                    "%s cannot be written: %s. Training goes on, and the lines wait in memory: "
                    "free space there",
                    self._path,
                    error.strerror,
                )
            self._is_late = True
        else:
            if self._is_late:
                _LOG.warning("%s is written again, and no line is missing", self._path)
            self._is_late = False
            self._waiting.clear()

    def close(self) -> None:
        """Log how many lines are lost. A second call does nothing."""
        if self._waiting:
            _LOG.error("%s lacks its last %s", self._path, counted(len(self._waiting), "line"))
            self._waiting.clear()


def _append(path: Path, content: bytes) -> None:
    """Append content to a file as a whole, after a newline if a kill has left half a line."""
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            content = b"\n" + content if file.read(1) != b"\n" else content
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


class JsonlSink(AppendedLines):
    """Appends one line per step to metrics.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / METRICS_FILE)
        try:
            self._path.touch()
        except OSError as error:
            raise TrainingError(file_failure(self._path, "written", error)) from error

    def write(self, metrics: StepMetrics) -> None:
        """Append a step.

        Raises a TrainingError if the run directory is gone.
        """
        self.append(metrics.to_json())

    def cut(self, step: int) -> None:
        """Remove the lines after a step, as `cut` does, and those that wait.

        Raises a TrainingError if the file cannot be written.
        """
        cut(self._path.parent, step)
        wanted = [line for line in self._waiting if json.loads(line)["step"] <= step]
        self._waiting.clear()
        self._waiting.extend(wanted)
