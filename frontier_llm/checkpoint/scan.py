"""Which checkpoints a folder holds, and which only look like one."""

import logging
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


def committed(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of what was committed, whole or damaged by now, the newest first.

    Args:
        folder: of all checkpoints of a run; it may be absent.
    """
    return [(step, path) for step, kind, path in _folders(folder) if kind in COMMITTED]


def never_committed(folder: Path) -> list[Path]:
    """Return what was begun and never completed, or is being written."""
    return [path for _, kind, path in _folders(folder) if kind == ".partial"]


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is whole; older ones are not opened.

    What is left out is named in the log. A folder with partial checkpoints alone is as good as an
    empty one.

    Args:
        folder: of all checkpoints of a run; it may be absent.

    Returns:
        None if no checkpoint was ever committed.

    Raises:
        CheckpointError: all are damaged.
    """
    damaged: list[CheckpointError] = []
    for _, path in committed(folder):
        try:
            found = Checkpoint.open(path)
        except CheckpointError as error:
            damaged.append(error)
            continue
        for reason in damaged:
            _log.warning("%s; it is left out", reason)
        return found
    if damaged:
        raise CheckpointError(f"every checkpoint of {folder} is damaged; the newest: {damaged[0]}")
    return None


def find(path: Path) -> Checkpoint:
    """Return the checkpoint that a path means.

    Args:
        path: of a checkpoint, of a folder of them, or a run.dir: of these the newest that is
            whole.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    return newest(folder) or Checkpoint.open(path)


def _folders(folder: Path) -> list[tuple[int, str, Path]]:
    """Return (step, what it is, path) of what is named like a checkpoint, the newest first."""
    if not folder.is_dir():
        return []
    found = [
        (*parsed, path)
        for path in folder.iterdir()
        if (parsed := parse_folder(path.name)) is not None and path.is_dir()
    ]
    return sorted(found, key=lambda each: (-each[0], each[1]))
