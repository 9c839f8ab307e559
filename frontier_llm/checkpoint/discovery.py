"""Find the checkpoints in a folder and check that they are complete.

A checkpoint is a folder such as `step_00000012`; `folders` lists the suffixes that mark others.
"""

import logging
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from frontier_llm.checkpoint.folders import COMMITTED, FOLDER, MANIFEST, parse_folder
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.peer_files import Peer
from frontier_llm.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose files have the right sizes."""

    folder: Path
    manifest: Manifest
    places: Mapping[str, Path | Peer] = field(default_factory=dict)
    """Where files lie that are not in `folder`, by name: the path of another folder, or a server on
    another node."""

    def place(self, name: str) -> Path | Peer:
        """Return the folder of a file, or the server that reads it."""
        return self.places.get(name, self.folder)

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.manifest.step

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read a checkpoint's manifest and check the sizes of its files.

        Raises:
            CheckpointError: the manifest is absent, damaged or in another format, or a file is
                absent or has another size; the message names the file.
        """
        if not (folder / MANIFEST).is_file():
            raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}")
        manifest = Manifest.load(folder)
        for name, file in manifest.files.items():
            path = folder / name
            try:
                status = path.stat()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is damaged: it is not a regular file")
            size = status.st_size
            if size != file.size:
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes and should have {file.size}"
                )
        return cls(folder, manifest)


def committed(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all committed checkpoints, the newest first.

    The checkpoints are not opened and may be damaged.

    Args:
        folder: folder of all checkpoints of a run; it may be absent.
    """
    return [(step, path) for step, suffix, path in _folders(folder) if suffix in COMMITTED]


def never_committed(folder: Path) -> list[Path]:
    """Return the folders of checkpoints that are being written or were never completed."""
    return [path for _, suffix, path in _folders(folder) if suffix == ".partial"]


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is not damaged.

    Newer checkpoints that are damaged are skipped and logged. Older checkpoints are not opened.
    Checkpoints that were never committed are ignored.

    Args:
        folder: folder of all checkpoints of a run; it may be absent.

    Returns:
        None if no checkpoint was ever committed.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    damaged: list[CheckpointError] = []
    for _, path in committed(folder):
        try:
            found = Checkpoint.open(path)
        except CheckpointError as error:
            damaged.append(error)
            continue
        for reason in damaged:
            _log.warning("%s; this checkpoint is skipped", reason)
        return found
    if damaged:
        raise CheckpointError(f"every checkpoint of {folder} is damaged; the newest: {damaged[0]}")
    return None


def find(path: Path) -> Checkpoint:
    """Return the checkpoint at a path.

    Args:
        path: folder of one checkpoint; or a folder of checkpoints or a `run.dir`, whose newest
            undamaged checkpoint is returned.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    found = newest(folder)
    if found is None and (path / "config.yaml").is_file():
        raise CheckpointError(f"the run in {path} has saved no checkpoint yet")
    if found is None and (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a folder of Hugging Face, no checkpoint: convert it first with\n"
            f"  frontier-llm convert --from hf {path} OUT"
        )
    return found or Checkpoint.open(path)


def _folders(folder: Path) -> list[tuple[int, str, Path]]:
    """Return (step, suffix, path) of all folders with a checkpoint's name, the newest first."""
    if not folder.is_dir():
        return []
    found = [
        (*parsed, path)
        for path in folder.iterdir()
        if (parsed := parse_folder(path.name)) is not None and path.is_dir()
    ]
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))
