"""Names of checkpoint folders and files, and changes of folders that survive a power failure.

This module imports no torch: the launcher uses it before torch is loaded.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from frontier_llm.atomic_files import sync

FOLDER = "checkpoints"
"""Folder below `run.dir` that holds the checkpoints of a run."""
MANIFEST = "manifest.json"
"""File in a checkpoint's folder that lists its files and tensors."""
NODE, COPY = "node_", "copy_of_node_"
"""Beginnings of the names of a node's folder on its disk, and of the copy on the next node's."""
COMMITTED = ("", ".replaced")
"""Suffixes returned by `parse_folder` that mark a committed checkpoint."""
_FOLDER = re.compile(r"step_(\d{8,})((?:\.[a-z]+)*)")


def rank_file_name(rank: int) -> str:
    """Return the name of the file that one rank writes alone."""
    return f"rank_{rank:05d}.safetensors"


def node_file_name(first_rank: int) -> str:
    """Return the name of the file that the ranks of a node share, given the node's first rank."""
    return f"ranks_from_{first_rank:05d}.safetensors"


def step_folder(step: int) -> str:
    """Return the name of a committed checkpoint's folder."""
    return f"step_{step:08d}"


def partial_folder(step: int) -> str:
    """Return the name that a checkpoint's folder has until the checkpoint is committed."""
    return f"{step_folder(step)}.partial"


def parse_folder(name: str) -> tuple[int, str] | None:
    """Split a folder's name into its step and its suffix; None for another folder.

    The suffix is one of:

    - "": a committed checkpoint.
    - ".partial": a checkpoint that is being written or was never completed.
    - ".replaced": a committed checkpoint that a newer one of the same step is replacing.
    - ".deleting": a checkpoint that is being deleted.
    - ".void": a checkpoint that no longer counts, because the run resumed from an earlier step.
    """
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), match[2] or "") if match else None


def step_folders(folder: Path) -> list[tuple[int, str, Path]]:
    """Return (step, suffix, path) of all checkpoints, the newest first. The folder may be absent.

    The checkpoints are not opened and may be damaged; `parse_folder` lists the suffixes.
    """
    found = [
        (*parsed, path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (parsed := parse_folder(path.name)) is not None and path.is_dir()
    ]
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))


def committed(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all committed checkpoints, the newest first."""
    return [(step, path) for step, suffix, path in step_folders(folder) if suffix in COMMITTED]


def superseded(
    folder: Path,
    keep: int,
    keep_every_steps: int | None,
    counts: Callable[[int, Path], bool] = lambda step, path: True,
) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) of committed checkpoints that need not be kept, the newest first.

    The newest `keep` of those that count stay, as do those of every `keep_every_steps` steps, of
    which a long run has so many that it is not asked whether they count.
    """
    newer = 0
    for step, path in committed(folder):
        is_kept = keep_every_steps is not None and step % keep_every_steps == 0
        if not (newer >= keep and is_kept) and counts(step, path):
            newer += 1
            if newer > keep:
                yield step, path


def remove_folder(folder: Path) -> None:
    """Delete a folder and its content, and wait until the deletion is on disk."""
    shutil.rmtree(folder)
    sync(folder.parent)
