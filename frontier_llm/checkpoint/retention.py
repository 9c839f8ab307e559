"""Delete old checkpoints, and rename checkpoints from which no run may resume any more.

Old checkpoints are deleted only after a newer one is committed, or after a run has resumed from
one, so there are always as many as `checkpoint.keep` asks for. A folder is renamed before its files
are deleted, so a half-deleted folder is never mistaken for a checkpoint.
"""

import logging
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from frontier_llm.atomic_files import sync
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.folders import (
    committed,
    remove_folder,
    step_folders,
    superseded,
)
from frontier_llm.checkpoint.kill_points import reach
from frontier_llm.errors import CheckpointError, file_failure

_log = logging.getLogger(__name__)
_pruning = threading.Lock()
"""Held while checkpoints are deleted: two threads of a rank may write to one folder."""


def prune(
    folder: Path,
    committed_step: int,
    keep: int,
    keep_every_steps: int | None,
    spared: Collection[int] = (),
) -> None:
    """Delete checkpoints that need not be kept any longer. One rank per folder calls this.

    The newest `keep` stay, those of every `keep_every_steps` steps, that which was just committed
    or loaded, and `spared` ones, which another thread reads or writes. Damaged checkpoints are
    neither counted nor deleted, so that they can be inspected. Unfinished folders of this and
    earlier steps, which a crash has left, are deleted too. A failure to delete is only logged.
    """

    def counts(step: int, path: Path) -> bool:
        if step == committed_step:
            return True
        try:
            Checkpoint.open(path)
        except CheckpointError:
            return False
        return True

    try:
        with _pruning:
            _remove_leftovers(folder, committed_step, spared)
            for step, path in superseded(folder, keep, keep_every_steps, counts):
                if step != committed_step and step not in spared:
                    _delete(path)
    except OSError as error:
        _log.warning("an old checkpoint cannot be deleted: %s", error)


def void_later(folder: Path, step: int) -> None:
    """Rename checkpoints after a step to `step_N.void`, so that no run resumes from them.

    A run that resumes from `step` repeats the later steps, perhaps with other samples. A renamed
    folder stays until the user deletes it, or until the same step is voided again. One process per
    folder calls this. A CheckpointError is raised if a folder cannot be renamed, so that the next
    start would resume from it.
    """
    renamed = False
    for later, path in committed(folder):
        if later <= step:
            continue
        void = path.with_name(f"{path.name}.void")
        try:
            if void.exists():
                remove_folder(void)
            path.rename(void)
            renamed = True
        except OSError as error:
            raise CheckpointError(file_failure(path, "renamed", error)) from None
        _log.warning("the run resumes from step %d: %s no longer counts", step, void)
    if renamed:
        sync(folder)


def delete_later(folder: Path, step: int) -> None:
    """Delete checkpoints after a step, where renamed ones would fill the memory of the node.

    Several processes may do so in the same folder at the same time. Errors are those of
    `void_later`.
    """
    for later, path in committed(folder):
        if later <= step:
            continue
        doomed = path.with_name(f"{path.name}.deleting")
        shutil.rmtree(doomed, ignore_errors=True)  # an earlier start was killed meanwhile
        try:
            path.rename(doomed)
        except FileNotFoundError:
            continue  # another process deletes it
        except OSError as error:
            raise CheckpointError(file_failure(path, "deleted", error)) from None
        shutil.rmtree(doomed, ignore_errors=True)
        _log.info("the run resumes from step %d: %s is deleted", step, path)


def _remove_leftovers(folder: Path, committed_step: int, spared: Collection[int]) -> None:
    for step, suffix, path in step_folders(folder):
        unfinished = suffix in (".partial", ".replaced") and step <= committed_step
        if (suffix == ".deleting" or unfinished) and step not in spared:
            remove_folder(path)


def _delete(folder: Path) -> None:
    doomed = folder.with_name(f"{folder.name}.deleting")
    folder.rename(doomed)
    sync(folder.parent)
    files = sorted(doomed.iterdir())
    for index, path in enumerate(files):
        if index == len(files) // 2:
            reach("deleting", rank=0)
        path.unlink()
    shutil.rmtree(doomed)
