"""Find the checkpoints in a folder and check that they are complete.

A checkpoint is a folder such as `step_00000012`; `folders` lists the suffixes that mark others.
"""

import json
import logging
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from frontier_llm.checkpoint.folders import FOLDER, MANIFEST, committed
from frontier_llm.checkpoint.manifest import Manifest, stored_bytes
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


def check_headers(checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's manifest with its folder and the files' headers, in both directions.

    Files on the disks of other nodes are not compared. A CheckpointError is raised if a header
    cannot be read, or one side has an entry that the other lacks.
    """
    manifest = checkpoint.manifest
    local = {name: checkpoint.place(name) for name in manifest.files}
    stored: dict[str, tuple[int, int]] = {}
    for file, place in local.items():
        if isinstance(place, Path):
            entries = _entries(place / file, manifest.files[file].size)
            stored |= {f"{key} of {file}": span for key, span in entries.items()}
    for name, tensor in manifest.tensors.items():
        for part in (p for p in tensor.stored_ranges if isinstance(local[p.file], Path)):
            for state, begin in part.bytes_at.items():
                key = part.keys[state]
                # for example `00003/norm.weight.1.master`: rank, tensor, range, state
                base = key.removesuffix(f".{state}").rpartition("/")[2]
                is_of_tensor = base == name or base.removeprefix(f"{name}.").isdigit()
                found = stored.pop(f"{key} of {part.file}", None)
                if not is_of_tensor or found != (
                    begin,
                    begin + stored_bytes(manifest, part, state),
                ):
                    raise _differs(checkpoint, f"{key} of {part.file}")
    others = {path.name for path in checkpoint.folder.glob("rank*.safetensors")} - local.keys()
    for lost in [*sorted(others), *(key for key in stored if not key.startswith("gap."))]:
        raise _differs(checkpoint, lost)


def _differs(checkpoint: Checkpoint, what: str) -> CheckpointError:
    problem = f"its manifest and the headers of its files differ in {what}"
    return damaged_checkpoint(f"{checkpoint.folder} is damaged: {problem}")


def _entries(path: Path, size: int) -> dict[str, tuple[int, int]]:
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise ValueError("it is longer than the file")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        spans = {key: entry["data_offsets"] for key, entry in entries.items()}
        return {key: (8 + length + begin, 8 + length + end) for key, (begin, end) in spans.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged_checkpoint(f"{path} has an unreadable header: {error}") from None
