"""Which checkpoints a folder holds, and which only look like one."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.names import COMMITTED, FOLDER, MANIFEST, parse_folder
from frontier_llm.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose files have the right sizes."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read a checkpoint's manifest and look at its files.

        Raises:
            CheckpointError: there is no manifest, it is damaged or of another format, or a file
                is absent or of another size; names it.
        """
        if not (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}")
        manifest = Manifest.load(folder)
        for name, file in manifest.files.items():
            path = folder / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
            if size != file.size:
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes and should have {file.size}"
                )
        return cls(folder, manifest)


@dataclass(frozen=True)
class Found:
    """What is in a folder of checkpoints, the newest first."""

    complete: tuple[Checkpoint, ...]
    damaged: tuple[tuple[int, CheckpointError], ...]
    """Step and reason."""
    partial: tuple[Path, ...]
    """Folders of checkpoints that were never committed."""


def scan(folder: Path) -> Found:
    """Look at everything in a folder of checkpoints; an absent folder holds nothing."""
    complete, damaged, partial = [], [], []
    for path, step, kind in _folders(folder):
        if kind == ".partial":
            partial.append(path)
        elif kind in COMMITTED:
            try:
                complete.append(Checkpoint.open(path))
            except CheckpointError as error:
                damaged.append((step, error))
    return Found(tuple(complete), tuple(damaged), tuple(partial))


def usable(folder: Path, fallback: bool) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that a run may go on from, the newest first.

    What is left out is named in the log. Partial checkpoints were never committed: a folder with
    nothing else is as good as an empty one.

    Args:
        folder: of all checkpoints of a run; it may be absent.
        fallback: whether older ones may stand in for a newest one that is damaged.

    Raises:
        CheckpointError: the newest is damaged and no other may stand in, or all are damaged.
    """
    found = scan(folder)
    best = found.complete[0].step if found.complete else -1
    newer = [error for step, error in found.damaged if step > best]
    if newer and not found.complete:
        raise CheckpointError(f"every checkpoint of {folder} is damaged; the newest: {newer[0]}")
    if newer and not fallback:
        raise CheckpointError(
            f"the newest checkpoint is damaged: {newer[0]}\n"
            f"  do: checkpoint.fallback=true goes on from an older one, of step {best}"
        )
    for path in found.partial:
        _log.warning("%s was never completed and is left out", path)
    for error in newer:
        _log.warning("%s; it is left out", error)
    return found.complete


def newest(folder: Path, fallback: bool = False) -> Checkpoint | None:
    """Return the newest of `usable`; None if no checkpoint was ever committed.

    Raises:
        CheckpointError: as `usable`.
    """
    return next(iter(usable(folder, fallback)), None)


def find(path: Path) -> Checkpoint:
    """Return the checkpoint that a path means.

    Args:
        path: of a checkpoint, of a folder of them, or a run.dir: of these the newest that is
            whole.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    return newest(folder, fallback=True) or Checkpoint.open(path)


def _folders(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield (path, step, what it is) of what is named like a checkpoint, the newest first."""
    if not folder.is_dir():
        return
    found = []
    for path in folder.iterdir():
        parsed = parse_folder(path.name)
        if parsed is not None and path.is_dir():
            found.append((parsed[0], parsed[1], path))
    for step, kind, path in sorted(found, key=lambda each: (-each[0], each[1])):
        yield path, step, kind
