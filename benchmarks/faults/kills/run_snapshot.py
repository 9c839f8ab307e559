"""Read the state of a run directory at one moment: checkpoints, steps and resumes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frontier_llm.checkpoint.folders import COMMITTED, FOLDER, parse_folder
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.trainer.ledger_file import LEDGER

Phase = Literal[
    "starting", "before the first checkpoint", "between saves", "during a save", "at the end"
]
PHASES: tuple[Phase, ...] = (
    "starting", "before the first checkpoint", "between saves", "during a save", "at the end",
)  # fmt: skip
"""What a run was doing when it was killed."""
Step = tuple[float, float]
"""Loss and gradient norm of a step, as written to metrics.jsonl."""


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
        """Return the phase of the run.

        Args:
            steps_before: `steps_started` when the processes were started.
            last_step: last step of the run.
        """
        if self.steps_started == steps_before:
            return "starting" if self.committed != last_step else "at the end"
        if self.committed is None:
            return "before the first checkpoint"
        if self.committed == last_step:
            return "at the end"
        return "during a save" if self.is_saving else "between saves"


def take_snapshot(run_dir: Path, since: float = 0.0) -> RunSnapshot:
    """Read a run directory, which may be absent.

    Args:
        run_dir: directory of the run.
        since: when the processes of the run were started, in seconds since 1970. Partial
            checkpoints that are older were left by a killed process, and nothing writes to them.
    """
    committed, partial = [], []
    folder = run_dir / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        step, kind = parse_folder(path.name) or (0, "none")
        if kind in COMMITTED:
            committed.append(step)
        elif kind == ".partial" and _last_write(path) >= since:
            partial.append(step)
    newest = max(committed, default=None)
    entries = list(_lines(run_dir / LEDGER))
    return RunSnapshot(
        committed=newest,
        is_saving=max(partial, default=-1) > (-1 if newest is None else newest),
        steps_started=sum("event" not in entry for entry in entries),
        resumes=tuple(entry["step"] for entry in entries if entry.get("event") == "resume"),
    )


def read_steps(run_dir: Path) -> dict[int, Step]:
    """Return the loss and the gradient norm of each step in metrics.jsonl.

    Raises:
        ValueError: a step occurs twice, or a line is not JSON.
    """
    found: dict[int, Step] = {}
    for line in _lines(run_dir / METRICS_FILE):
        if line["step"] in found:
            raise ValueError(f"step {line['step']} occurs twice")
        found[line["step"]] = (line["loss"], line["grad_norm"])
    return found


def _last_write(folder: Path) -> float:
    """Return when a folder or a file in it was last written, in seconds since 1970."""
    times = [0.0]
    try:
        times += [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    except FileNotFoundError:
        pass  # the folder has just been renamed to its final name
    return max(times)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON lines file; none if the file is absent."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"}\n"):
            yield json.loads(line)
