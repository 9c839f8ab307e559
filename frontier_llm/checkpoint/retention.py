"""Which checkpoints stay: the newest few, and every so many steps one for good.

Called when a newer one is committed, so there is never less than there was to be kept. A folder
loses its name before its files: what is half deleted is no checkpoint.
"""

import logging
import shutil
from pathlib import Path

from frontier_llm.checkpoint.durable import remove_folder, sync_folder
from frontier_llm.checkpoint.faults import reach
from frontier_llm.checkpoint.names import COMMITTED, parse_folder
from frontier_llm.checkpoint.scan import Checkpoint, committed
from frontier_llm.errors import CheckpointError

_log = logging.getLogger(__name__)


def prune(folder: Path, committed_step: int, keep: int, keep_every_steps: int | None) -> None:
    """Delete what is no longer to be kept. One rank a folder.

    Damaged checkpoints neither count nor go: somebody may want to look at them. What earlier
    attempts left unfinished up to this step goes. A failure to delete is logged, no more.

    Args:
        folder: of all checkpoints of the run.
        committed_step: of the checkpoint that is now there; it stays.
        keep: how many of the newest stay, at least one.
        keep_every_steps: checkpoints whose step is a multiple of this stay as well.
    """
    try:
        _remove_leftovers(folder, committed_step)
        whole = 0
        for step, path in committed(folder):
            if whole >= keep and keep_every_steps is not None and step % keep_every_steps == 0:
                continue  # unopened: a long run has many of them
            if step != committed_step and not _is_whole(path):
                continue
            whole += 1
            if whole > keep and step != committed_step:
                _delete(path)
    except OSError as error:
        _log.warning("an old checkpoint cannot be deleted: %s", error)


def void_later(folder: Path, step: int) -> None:
    """Take checkpoints of later steps out of the count: the run goes on from `step` another way.

    They are renamed to `step_N.void`, and stay until somebody deletes them. One process a folder.

    Args:
        folder: of all checkpoints of the run; it may be absent.
        step: that the run goes on from.

    Raises:
        CheckpointError: one cannot be renamed: the next start would take it for the newest.
    """
    renamed = False
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        parsed = parse_folder(path.name)
        if parsed is None or parsed[0] <= step or parsed[1] not in COMMITTED:
            continue
        void = path.with_name(f"{path.name}.void")
        try:
            if void.exists():
                remove_folder(void)
            path.rename(void)
            renamed = True
        except OSError as error:
            raise CheckpointError(f"{path} cannot be renamed: {error.strerror}") from None
        _log.warning("the run goes on from step %d: %s no longer counts", step, void)
    if renamed:
        sync_folder(folder)


def _is_whole(path: Path) -> bool:
    try:
        Checkpoint.open(path)
    except CheckpointError:
        return False
    return True


def _remove_leftovers(folder: Path, committed_step: int) -> None:
    for path in folder.iterdir():
        parsed = parse_folder(path.name)
        if parsed is None or not path.is_dir():
            continue
        step, kind = parsed
        if kind == ".deleting" or (kind in (".partial", ".replaced") and step <= committed_step):
            remove_folder(path)


def _delete(folder: Path) -> None:
    doomed = folder.with_name(f"{folder.name}.deleting")
    folder.rename(doomed)
    sync_folder(folder.parent)
    files = sorted(doomed.iterdir())
    for index, path in enumerate(files):
        if index == len(files) // 2:
            reach("deleting", rank=0)
        path.unlink()
    shutil.rmtree(doomed)
