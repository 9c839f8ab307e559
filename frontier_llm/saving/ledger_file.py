"""Writes ledger.jsonl, which records the samples that each step has read and the events of a run.

    {"step": 12, "first_sample": 176, "samples": 16, "digest": "5f0c2a91d3"}
    {"event": "resume", "step": 10, "time": "2026-01-31T12:00:00+00:00", "changes": {...}}
    {"event": "blend", ..., "segments": [{"first_sample": 0, "weights": {"en": 0.7, ...}}, ...]}
    {"event": "lengths", ..., "segments": [{"first_sample": 0, "tokens": 1024, ...}, ...]}

A resumed run repeats the steps after its checkpoint. A repeated step has several lines, and the
last one counts. A `blend` event gives the weights of the corpora over the whole run, from which
samples are drawn, and a `lengths` event the lengths of samples; the last one of each counts.

`digest` identifies the tokens of a step: it is the sum of the xxh32 hashes of its samples. It does
not depend on the layout, so two runs with equal digests have read the same data.
"""

import json
from contextlib import suppress
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from frontier_llm.data.sample_order import LengthSegment
from frontier_llm.telemetry.jsonl import LEDGER, AppendedLines, lines_from_end


class BlendSegment(BaseModel, extra="allow"):
    """The weights of the corpora from a sample on, as `Schedule.to_meta` writes them."""

    first_sample: Annotated[int, Field(ge=0, le=10**18)]
    weights: Annotated[
        dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)
    ]


class StoredLengths(BaseModel, extra="forbid"):
    """A `LengthSegment` as JSON."""

    first_sample: Annotated[int, Field(ge=0, le=10**18)]
    tokens: Annotated[int, Field(ge=1, le=10**18)]
    keeps_all: bool


_SEGMENTS: dict[str, TypeAdapter[Any]] = {
    "blend": TypeAdapter(Annotated[list[BlendSegment], Field(min_length=1)]),
    "lengths": TypeAdapter(Annotated[list[StoredLengths], Field(min_length=1)]),
}
"""Segments of a run by the event that stores them."""
_DAMAGE = (ValueError, TypeError, KeyError, RecursionError)
"""Errors of lines that are incomplete or changed."""


def blend_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the corpora's weights over a run, as `Schedule.to_meta`; [] without `blend` event."""
    return _segments_of(run_dir, "blend")


def lengths_of(run_dir: Path) -> list[LengthSegment]:
    """Return the lengths of samples over a run; [] if an older version has written the ledger."""
    return [LengthSegment(**segment) for segment in _segments_of(run_dir, "lengths")]


def _segments_of(run_dir: Path, event: str) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = []
    path = run_dir / LEDGER
    start = f'{{"event": "{event}"'.encode()
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        if line.startswith(start):
            with suppress(*_DAMAGE):
                found = json.loads(line)["segments"]
                _SEGMENTS[event].validate_python(found)
                segments = found
    return segments


class LedgerFile:
    """Appends lines to the ledger, on rank 0. They wait in memory while it cannot be written."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LEDGER
        self._lines = AppendedLines(self._path)

    def step(self, step: int, first_sample: int, samples: int, digest: int) -> None:
        """Record the samples of a step; raise TrainingError if the run directory is gone."""
        self._append(
            {"step": step, "first_sample": first_sample, "samples": samples,
             "digest": f"{digest:x}"}
        )  # fmt: skip

    def event(self, name: str, step: int, **facts: Any) -> None:
        """Record a `resume`, `replacement`, `blend`, `lengths`, `skip` or `rewind` after a step."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._append({"event": name, "step": step, "time": now, **facts})

    def last_step(self) -> int | None:
        """Return the step of the last line about a step; None if there is no such line."""
        for line in chain(reversed(self._lines.waiting), lines_from_end(self._path)):
            with suppress(*_DAMAGE):
                if "digest" in (entry := json.loads(line)):
                    return int(entry["step"])
        return None

    def close(self) -> None:
        """Log how many lines could not be written."""
        self._lines.close()

    def _append(self, entry: dict[str, Any]) -> None:
        self._lines.append(json.dumps(entry))
