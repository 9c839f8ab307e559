"""Let a new checkpoint overwrite the files of an old one that need not be kept any longer.

A file system takes about as long to free the blocks of a file and to allocate those of another as
to write them: on ext4 with `discard` and on tmpfs, a rank that overwrites its file of an old
checkpoint writes two to three times as fast. Therefore the newest deleted checkpoint becomes the
folder `spare`, and each rank takes its file from there. The disk needs no more room than before,
because the next checkpoint would need new blocks anyway.

Nobody may notice that a deleted file is overwritten. A file is taken only if it has no other hard
link, and if no process has it open, for example to copy it. The kernel says so by granting a lease
(man 2 fcntl, F_SETLEASE). Parallel file systems know no leases, so nothing is reused there.
"""

import errno
import fcntl
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from frontier_llm.checkpoint.folders import MANIFEST, sync_folder
from frontier_llm.checkpoint.kill_points import reach

SPARE = "spare"
"""Name of the folder, next to the checkpoints."""


def keep_spare(checkpoint: Path) -> bool:
    """Make the folder of a checkpoint the spare folder, in place of an earlier one.

    One rank per folder calls this.

    Args:
        checkpoint: folder that need not be kept any longer.

    Returns:
        False if nothing has changed, because the file system has no leases.

    Raises:
        OSError: the folder cannot be renamed.
    """
    if not _has_leases(checkpoint / MANIFEST):
        return False
    remove_spare(checkpoint.parent)
    spare = checkpoint.with_name(SPARE)
    checkpoint.rename(spare)
    reach("deleting", rank=0)
    (spare / MANIFEST).unlink()
    sync_folder(checkpoint.parent)
    return True


def take_spare(path: Path, size: int) -> bool:
    """Move a spare file to a new path, if it may be overwritten there; otherwise delete it.

    Args:
        path: path of the new file, in the folder of a checkpoint that is being written.
        size: size that the file must have in bytes.

    Returns:
        Whether there is a file at `path` now that may be overwritten.
    """
    spare = path.parent.parent / SPARE / path.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        spare.rename(path)
    except OSError:  # there is none
        return False
    if _is_unused(path, size):
        return True
    path.unlink(missing_ok=True)
    return False


def remove_spare(folder: Path) -> None:
    """Delete the spare folder below the folder of all checkpoints, if it exists."""
    # ranks may take files meanwhile
    shutil.rmtree(folder / SPARE, ignore_errors=True)


def _has_leases(path: Path) -> bool:
    """Whether the file system of a file has leases."""
    try:
        return _lease_error(path) in (0, errno.EAGAIN)
    except OSError:
        return False


def _is_unused(path: Path, size: int) -> bool:
    """Whether a file has this size, one name, and no process that uses it."""
    try:
        status = path.stat()
        return status.st_size == size and status.st_nlink == 1 and not _lease_error(path)
    except OSError:
        return False


def _lease_error(path: Path) -> int:
    """Ask for a lease and give it back; return the number of the error, 0 = it was granted.

    A lease for writing (F_WRLCK) is granted if no other descriptor of the file is open. A process
    that opens the file until the lease is given back waits, and the kernel sends this process a
    signal. It must be one that is ignored, because SIGIO would end the process.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return errno.ENOSYS
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        with suppress(OSError):
            os.close(descriptor)
    return 0
