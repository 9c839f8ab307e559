"""Write metrics.jsonl, the file of a run directory that has one JSON object per step.

Reports and benchmarks read the file through history.py.
"""

import contextlib
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.metrics import StepMetrics
from frontier_llm.units import MIB

METRICS_FILE = "metrics.jsonl"
LARGEST = 1e100
"""Larger finite numbers are damage. A chart could not show them."""
_LINE_BYTES = 4 * MIB
"""Largest length of a line."""


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


def cut(run_dir: Path, step: int) -> None:
    """Shorten the file to the steps up to `step`, as a run does that resumes at this step.

    Everything from the first later step or the first damaged line on is removed. A `JsonlSink` that
    has the file open continues at the new end.

    Raises:
        TrainingError: the file cannot be written; the message names it.
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
        raise TrainingError(f"{path} cannot be written: {error.strerror}") from None


class JsonlSink:
    """Appends one line per step. When `write` returns, the operating system has the line.

    If the file cannot be written, the run ends, because a run without a record cannot be evaluated.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE
        try:
            self._file = self._path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise self._failure(error) from error

    def write(self, metrics: StepMetrics) -> None:
        """Append a step."""
        try:
            self._file.write(metrics.to_json() + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):  # `close` tries to write the same line again
                self._file.close()
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        try:
            self._file.close()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self._path} cannot be written: {error.strerror}. "
            "Free space there, or set run.dir to another file system."
        )
