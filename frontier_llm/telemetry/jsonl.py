"""Write metrics.jsonl, the file of a run directory that has one JSON object per step.

Reports and benchmarks read the file through history.py.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.metrics import StepMetrics

METRICS_FILE = "metrics.jsonl"


def parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if it is damaged, or incomplete after a crash."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_step = isinstance(row, dict) and type(row.get("step")) is int
    return row if is_step else None


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
            for line in file:
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
        """Append a step.

        Raises:
            TrainingError: the file cannot be written; the message names it.
        """
        try:
            self._file.write(metrics.to_json() + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):  # `close` tries to write the same line again
                self._file.close()
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file. A second call does nothing.

        Raises:
            TrainingError: the last bytes cannot be written.
        """
        try:
            self._file.close()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self._path} cannot be written: {error.strerror}. "
            "Free space there, or set run.dir to another file system."
        )
