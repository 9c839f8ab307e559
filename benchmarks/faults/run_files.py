"""Read what a run that is killed has written: its steps, its samples and its checkpoints."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from frontier_llm.checkpoint.folders import FOLDER, committed, step_folders
from frontier_llm.telemetry.jsonl import LEDGER, METRICS_FILE

Phase = Literal[
    "starting", "before the first checkpoint", "between saves", "during a save", "at the end"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""What a run was doing when it was killed."""
Values = dict[int, tuple[Any, ...]]
"""Values by step."""


def read_steps(run_dir: Path, *names: str) -> tuple[Values, list[int]]:
    """Return columns of metrics.jsonl by step, and the steps that have two lines."""
    found: Values = {}
    double = []
    for row in _lines(run_dir / METRICS_FILE):
        double += [row["step"]] if row["step"] in found else []
        found[row["step"]] = tuple(row.get(name) for name in names)
    return found, double


def read_samples(run_dir: Path) -> tuple[Values, list[int]]:
    """Return first sample, samples and digest by step, and the steps that have two lines."""
    found: Values = {}
    double = []
    for entry in _lines(run_dir / LEDGER):
        if entry.get("event") == "resume":  # these steps are done again
            found = {step: read for step, read in found.items() if step <= entry["step"]}
        if "digest" in entry:
            double += [entry["step"]] if entry["step"] in found else []
            found[entry["step"]] = entry["first_sample"], entry["samples"], entry["digest"]
    return found, double


def count_steps(run_dir: Path) -> int:
    """Return the number of steps in the ledger; a step that was done twice counts twice."""
    return sum("digest" in entry for entry in _lines(run_dir / LEDGER))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON lines file; none if the file is absent."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"}\n"):
            yield json.loads(line)


@dataclass(frozen=True)
class RunSnapshot:
    """A run directory at one moment."""

    committed: int | None
    """Step of the newest checkpoint whose folder has its final name; None if there is none."""
    is_saving: bool
    """Whether a later checkpoint is being written."""
    steps_started: int
    """Number of steps that have been started, counting repeated ones each time."""
    resumes: tuple[int, ...]
    """Steps from which the run has been resumed so far."""

    def phase(self, steps_before: int, last_step: int) -> Phase:
        """Return what the run does, given `steps_started` when its processes were started."""
        if self.committed == last_step:
            return "at the end"
        if self.steps_started == steps_before:
            return "starting"
        if self.committed is None:
            return "before the first checkpoint"
        return "during a save" if self.is_saving else "between saves"


def take_snapshot(run_dir: Path, since: float = 0.0) -> RunSnapshot:
    """Read a run directory, which may be absent.

    `since` is when the processes of the run were started, in seconds since 1970. Partial
    checkpoints that are older were left by a killed process, and nothing writes to them.
    """
    partial = [
        step
        for step, suffix, path in step_folders(run_dir / FOLDER)
        if suffix == ".partial" and _last_write(path) >= since
    ]
    newest = max(committed_steps(run_dir / FOLDER), default=None)
    entries = list(_lines(run_dir / LEDGER))
    return RunSnapshot(
        committed=newest,
        is_saving=max(partial, default=-1) > (-1 if newest is None else newest),
        steps_started=sum("event" not in entry for entry in entries),
        resumes=tuple(entry["step"] for entry in entries if entry.get("event") == "resume"),
    )


def committed_steps(folder: Path) -> set[int]:
    """Return the steps of the committed checkpoints in a folder, which may be absent."""
    return {step for step, _ in committed(folder)}


def _last_write(folder: Path) -> float:
    """Return when a folder or a file in it was last written, in seconds since 1970."""
    times = [0.0]
    try:
        times += [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    except FileNotFoundError:
        pass  # the folder has just been renamed to its final name
    return max(times)
