"""What the disk does by itself: large writes and reads with nothing else to do, to compare with."""

import mmap
import os
import time
from collections.abc import Callable, Iterable
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
    buffer = filled_buffer()
    write_seconds = _time(lambda: write_blocks(path, buffer, blocks))
    drop_from_cache([path])
    read_seconds = _time(lambda: _read_blocks(path, DIRECT, buffer, blocks))
    drop_from_cache([path])
    cached_read_seconds = _time(lambda: _read_blocks(path, 0, buffer, blocks))
    path.unlink()
    return DiskFigures(blocks * BLOCK_BYTES, write_seconds, read_seconds, cached_read_seconds)


def filled_buffer() -> mmap.mmap:
    """Return a block of random bytes, in whole pages."""
    buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.write(os.urandom(MIB) * (BLOCK_BYTES // MIB))
    return buffer


def write_blocks(path: Path, buffer: mmap.mmap, blocks: int) -> None:
    """Write a block that many times, past the page cache, and sync."""
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | DIRECT)
    for index in range(blocks):
        moved = os.pwrite(descriptor, buffer, index * BLOCK_BYTES)
        assert moved == BLOCK_BYTES, (path, moved)
    os.fsync(descriptor)
    os.close(descriptor)


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


def _read_blocks(path: Path, flags: int, buffer: mmap.mmap, blocks: int) -> None:
    descriptor = _open(path, os.O_RDONLY | flags)
    for index in range(blocks):
        moved = os.preadv(descriptor, [buffer], index * BLOCK_BYTES)
        assert moved == BLOCK_BYTES, (path, moved)
    os.close(descriptor)


def _time(work: Callable[[], None]) -> float:
    """Return how long it takes while all ranks do the same."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o644)
    except OSError:  # a file system that cannot do without the page cache
        return os.open(path, flags & ~DIRECT, 0o644)
