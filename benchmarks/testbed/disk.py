"""Measure the speed of the disk alone, with which bench_checkpoint compares savers."""

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
"""Flag that bypasses the page cache; 0 where the system has none."""


@dataclass(frozen=True)
class DiskFigures:
    """Measurements of one rank while all other ranks do the same."""

    size: int
    """Size of the file in bytes."""
    write_seconds: float
    """Time of a write with fsync that bypasses the page cache."""
    read_seconds: float
    """Time of a read that bypasses the page cache."""
    cached_read_seconds: float
    """Time of a read through the page cache, which is empty at the start."""


def measure(rank: int, folder: Path, size: int) -> DiskFigures:
    """Write a file and read it twice. Collective over all ranks.

    `size` is rounded down to whole blocks of 16 MiB.
    """
    path, blocks = folder / f"plain_{rank}", max(1, size // BLOCK_BYTES)
    buffer = filled_buffer()
    write_seconds = together(lambda: write_blocks(path, buffer, blocks))
    drop_from_cache([path])
    read_seconds = together(lambda: _read_blocks(path, DIRECT, buffer, blocks))
    drop_from_cache([path])
    cached_read_seconds = together(lambda: _read_blocks(path, 0, buffer, blocks))
    path.unlink()
    return DiskFigures(blocks * BLOCK_BYTES, write_seconds, read_seconds, cached_read_seconds)


def filled_buffer() -> mmap.mmap:
    """Return a page-aligned block of random bytes."""
    buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.write(os.urandom(MIB) * (BLOCK_BYTES // MIB))
    return buffer


def write_blocks(path: Path, buffer: mmap.mmap, blocks: int) -> None:
    """Write the buffer `blocks` times to a file, bypassing the page cache, then fsync."""
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | DIRECT)
    for index in range(blocks):
        written = os.pwrite(descriptor, buffer, index * BLOCK_BYTES)
        assert written == BLOCK_BYTES, (path, written)
    os.fsync(descriptor)
    os.close(descriptor)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Remove the content of files from the page cache."""
    for path in paths:
        sync_file(path)  # pages that are not on disk yet cannot be removed
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_blocks(path: Path, flags: int, buffer: mmap.mmap, blocks: int) -> None:
    descriptor = _open(path, os.O_RDONLY | flags)
    for index in range(blocks):
        read = os.preadv(descriptor, [buffer], index * BLOCK_BYTES)
        assert read == BLOCK_BYTES, (path, read)
    os.close(descriptor)


def together(work: Callable[[], object]) -> float:
    """Return the time of `work` in seconds, started on all ranks together."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _open(path: Path, flags: int) -> int:
    """Open a file; without DIRECT if its file system does not support it."""
    try:
        return os.open(path, flags, 0o644)
    except OSError:
        return os.open(path, flags & ~DIRECT, 0o644)
