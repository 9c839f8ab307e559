"""Let a new checkpoint overwrite the files of an old one that need not be kept any longer.

A file system takes long to free the blocks of a file and to allocate those of another: on ext4 with
`discard` and on tmpfs, a save takes a third less time if each rank overwrites its file of an old
checkpoint (benchmarks/bench_overwrite.py). Therefore the newest deleted checkpoint becomes the
folder `spare`, and each rank takes its file from there. The disk needs no more room than before,
because the next checkpoint would need new blocks anyway.

Nobody may notice that a deleted file is overwritten. A file is taken only if it has no other hard
link, and if no process has it open, for example to copy it. The kernel says so by granting a lease
(man 2 fcntl, F_SETLEASE). It knows the processes of this node only, so nothing is reused on file
systems that nodes share.
"""

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
LOCAL = ("ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs")
"""File systems of one node, as /proc/self/mountinfo calls them."""


def keep_spare(checkpoint: Path) -> bool:
    """Make the folder of a checkpoint the spare folder, in place of an earlier one.

    One rank per folder calls this.

    Args:
        checkpoint: folder that need not be kept any longer.

    Returns:
        False if this was not possible: nodes may share the file system, it has no leases, a process
        uses the manifest, or another thread has changed the folders. The checkpoint is unchanged
        then, or has a name that the next pruning deletes.
    """
    doomed = checkpoint.with_name(f"{checkpoint.name}.deleting")
    try:
        if not (_is_local(checkpoint) and _is_unused(checkpoint / MANIFEST)):
            return False
        checkpoint.rename(doomed)
        reach("deleting", rank=0)
        (doomed / MANIFEST).unlink()
        # only then a rank may overwrite a file: a power failure must not bring the checkpoint back
        sync_folder(checkpoint.parent)
        remove_spare(checkpoint.parent)
        doomed.rename(checkpoint.with_name(SPARE))
    except OSError:
        return False
    return True


def take_spare(path: Path, size: int) -> bool:
    """Move a spare file to a new path, if it may be overwritten there; otherwise delete it.

    Args:
        path: path of the new file, in the folder of a checkpoint that is being written.
        size: size that the file must have in bytes.

    Returns:
        Whether there is a file at `path` now that may be overwritten.

    Raises:
        OSError: the file can neither be used nor deleted.
    """
    spare = path.parent.parent / SPARE / path.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        spare.rename(path)
    except OSError:  # there is none
        return False
    with suppress(OSError):
        if path.stat().st_size == size and _is_unused(path):
            return True
    path.unlink()
    return False


def remove_spare(folder: Path) -> None:
    """Delete the spare folder below the folder of all checkpoints, if it exists."""
    # ranks may take files meanwhile
    shutil.rmtree(folder / SPARE, ignore_errors=True)


def _is_local(folder: Path) -> bool:
    """Whether only processes of this node see a folder."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return False
    for line in lines:  # man 5 proc_pid_mountinfo
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in LOCAL
    return False


def _is_unused(path: Path) -> bool:
    """Whether a file has one name, and no other process has it open or wants to open it.

    A lease for writing (F_WRLCK) is granted if no other descriptor of the file is open. A process
    that opens the file until the lease is given back waits, and the kernel sends this process a
    signal. It must be one that is ignored, because SIGIO would end the process. F_GETLEASE then
    returns what the lease should become.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        has_one_name = os.fstat(descriptor).st_nlink == 1
        return has_one_name and fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_WRLCK
    except OSError:
        return False
    finally:
        os.close(descriptor)  # gives the lease back
