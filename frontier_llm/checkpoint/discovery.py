"""Find the checkpoints in a folder and check that they are complete.

A checkpoint is a folder such as `step_00000012`; `folders` lists the suffixes that mark others.
"""

import logging
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from frontier_llm.checkpoint.folders import FOLDER, MANIFEST, committed
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.peer_files import Peer
from frontier_llm.errors import CheckpointError, damaged_checkpoint

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

        A CheckpointError names the manifest or file that is absent or damaged.
        """
        if not (folder / MANIFEST).is_file():
            raise CheckpointError(
                f"{folder} is no checkpoint: it has no {MANIFEST}\n"
                "  do: give a run directory, or a folder step_N of its checkpoints"
            )
        manifest = Manifest.load(folder)
        for name, file in manifest.files.items():
            path = folder / name
            try:
                status = path.stat()
            except OSError as error:
                what = f"{path} cannot be read: {error.strerror}"
                if isinstance(error, FileNotFoundError):
                    raise damaged_checkpoint(what) from None
                raise CheckpointError(f"{what}\n  do: make it readable") from None
            if not stat.S_ISREG(status.st_mode):
                raise damaged_checkpoint(f"{path} is damaged: it is not a regular file")
            size = status.st_size
            if size != file.size:
                raise damaged_checkpoint(
                    f"{path} is damaged: it has {size} bytes and should have {file.size}"
                )
        return cls(folder, manifest)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint; None if none was ever committed.

    Newer checkpoints that are damaged are skipped and logged. Older checkpoints are not opened. A
    CheckpointError is raised if all are damaged.
    """
    damaged: list[CheckpointError] = []
    for _, path in committed(folder):
        try:
            found = Checkpoint.open(path)
        except CheckpointError as failure:
            damaged.append(failure)
            continue
        for error in damaged:
            _log.warning("%s; this checkpoint is skipped", error.reason)
        return found
    if damaged:
        raise CheckpointError(
            f"every checkpoint of {folder} is damaged; the newest: {damaged[0].reason}\n"
            "  do: put an undamaged copy of one there, or use a new folder"
        )
    return None


def find(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder, or the newest undamaged one of a `run.dir`.

    A CheckpointError is raised if there is none, or it is damaged.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    found = newest(folder)
    if found is None and (path / "config.yaml").is_file():
        raise CheckpointError(
            f"the run in {path} has saved no checkpoint yet\n  do: wait for its first one, or "
            "train again with checkpoint=lazy and a checkpoint.every_steps of at most trainer.steps"
        )
    if found is None and (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a folder of Hugging Face, no checkpoint\n  do: convert it first with "
            f"frontier-llm convert --from hf {path} OUT"
        )
    return found or Checkpoint.open(path)
