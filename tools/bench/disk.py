"""What the disk does by itself: large writes and reads with nothing else to do, to compare with."""

import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from frontier_llm.units import MIB

BLOCK_BYTES = 16 * MIB
DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class DiskFigures:
    """Seconds that one rank took for its bytes while the other ranks did the same."""

    size: int
    """Bytes of each."""
    write_seconds: float
    """Past the page cache, synced."""
    read_seconds: float
    """Past the page cache."""
    cached_read_seconds: float
    """Through the page cache, which is empty at the beginning."""


def measure(folder: Path, rank: int, size: int) -> DiskFigures:
    """Write a file and read it twice; all ranks at the same time.

    Args:
        folder: on the disk in question.
        rank: of this process.
        size: bytes; rounded to whole blocks.
    """
    path, blocks = folder / f"plain_{rank}", max(1, size // BLOCK_BYTES)
    buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.write(os.urandom(MIB) * (BLOCK_BYTES // MIB))
    write_seconds = _time(path, os.O_WRONLY | os.O_CREAT | DIRECT, buffer, blocks)
    drop_from_cache([path])
    read_seconds = _time(path, os.O_RDONLY | DIRECT, buffer, blocks)
    drop_from_cache([path])
    cached_read_seconds = _time(path, os.O_RDONLY, buffer, blocks)
    path.unlink()
    return DiskFigures(blocks * BLOCK_BYTES, write_seconds, read_seconds, cached_read_seconds)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Have the system forget the content of files that it holds in memory."""
    for path in paths:
        sync_file(path)  # what is not on disk yet would stay
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _time(path: Path, flags: int, buffer: mmap.mmap, blocks: int) -> float:
    """Write or read that many blocks; return the seconds, with the sync of what was written."""
    descriptor = _open(path, flags)
    writes = bool(flags & os.O_WRONLY)
    dist.barrier()
    start = time.perf_counter()
    for index in range(blocks):
        at = index * BLOCK_BYTES
        moved = os.pwrite(descriptor, buffer, at) if writes else os.preadv(descriptor, [buffer], at)
        assert moved == BLOCK_BYTES, (path, moved)
    if writes:
        os.fsync(descriptor)
    seconds = time.perf_counter() - start
    os.close(descriptor)
    return seconds


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o644)
    except OSError:  # a file system that cannot do without the page cache
        return os.open(path, flags & ~DIRECT, 0o644)
