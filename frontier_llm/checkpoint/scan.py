"""Which checkpoints a folder holds, and which only look like one."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.checkpoint.manifest import MANIFEST, Manifest, parse_folder
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
        elif kind in ("", ".replaced"):
            try:
                complete.append(Checkpoint.open(path))
            except CheckpointError as error:
                damaged.append((step, error))
    return Found(tuple(complete), tuple(damaged), tuple(partial))


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a folder.

    What is newer and cannot be used is named in the log. Partial checkpoints were never committed:
    a folder with nothing else is as good as an empty one.

    Returns:
        None if no checkpoint was ever committed.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    found = scan(folder)
    best = found.complete[0] if found.complete else None
    newer = [error for step, error in found.damaged if best is None or step > best.step]
    for path in found.partial:
        _log.warning("%s was never completed and is left out", path)
    for error in newer:
        _log.warning("%s; it is left out", error)
    if best is None and newer:
        raise CheckpointError(
            f"no checkpoint of {folder} can be used: {newer[0]}"
            + (f" (and {len(newer) - 1} more)" if len(newer) > 1 else "")
        )
    return best


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
