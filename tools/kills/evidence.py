"""What the directory of a run says about how far it came, whoever was killed meanwhile."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frontier_llm.checkpoint.names import COMMITTED, FOLDER, parse_folder
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.trainer.ledger import LEDGER

Phase = Literal[
    "starting", "before the first checkpoint", "between saves", "during a save", "at the end"
]
PHASES: tuple[Phase, ...] = (
    "starting", "before the first checkpoint", "between saves", "during a save", "at the end",
)  # fmt: skip
Step = tuple[float, float]
"""Loss and gradient norm of a step, as they were written."""


@dataclass(frozen=True)
class Scene:
    """A run directory at one moment."""

    committed: int | None
    """Step of the newest checkpoint whose folder has its final name."""
    is_saving: bool
    """Whether a later one is being written."""
    steps_read: int
    """How often a step has begun, repeated ones too."""
    resumes: tuple[int, ...]
    """From which steps the run has gone on so far."""

    def phase(self, steps_before: int, last_step: int) -> Phase:
        """Name the moment.

        Args:
            steps_before: `steps_read` when the processes were started.
            last_step: of the run.
        """
        if self.steps_read == steps_before:
            return "starting" if self.committed != last_step else "at the end"
        if self.committed is None:
            return "before the first checkpoint"
        if self.committed == last_step:
            return "at the end"
        return "during a save" if self.is_saving else "between saves"


def look(run_dir: Path, since: float = 0.0) -> Scene:
    """Look at a run directory, which may be absent.

    Args:
        run_dir: of the run.
        since: when its processes were started; what was left unfinished before is not being
            written.
    """
    committed, partial = [], []
    folder = run_dir / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        step, kind = parse_folder(path.name) or (0, "none")
        if kind in COMMITTED:
            committed.append(step)
        elif kind == ".partial" and _touched(path) >= since:
            partial.append(step)
    newest = max(committed, default=None)
    entries = list(_lines(run_dir / LEDGER))
    return Scene(
        committed=newest,
        is_saving=max(partial, default=-1) > (-1 if newest is None else newest),
        steps_read=sum("event" not in entry for entry in entries),
        resumes=tuple(entry["step"] for entry in entries if entry.get("event") == "resume"),
    )


def steps(run_dir: Path) -> dict[int, Step]:
    """Return what metrics.jsonl holds by now.

    Raises:
        ValueError: a step is there twice, or a line is no JSON.
    """
    found: dict[int, Step] = {}
    for line in _lines(run_dir / METRICS_FILE):
        if line["step"] in found:
            raise ValueError(f"step {line['step']} is there twice")
        found[line["step"]] = (line["loss"], line["grad_norm"])
    return found


def _touched(folder: Path) -> float:
    """Return when something in a folder was last written."""
    times = [0.0]
    try:
        times += [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    except FileNotFoundError:
        pass  # it has just got its final name
    return max(times)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file of JSON lines, not torn ones; none if it is absent."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"}\n"):
            yield json.loads(line)
