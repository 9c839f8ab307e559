"""Move the memory of this process to huge pages, so that it forks several times faster.

A fork copies the page tables of the parent: one entry per 4 KiB of the Python objects of torch,
megatron-core and all test modules, but one per 2 MiB of a huge page. Tests fork thousands of ranks.
"""

import ctypes
import os
import sys
from pathlib import Path

HUGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
"""Linux 6.1; earlier kernels refuse the call, and nothing changes."""
FORKS_BETWEEN = 100
"""Writes of children and parent split huge pages again."""


def keep_forks_fast() -> None:
    """Collapse memory before the first fork of this process, and again after every 100 forks."""
    forks = 0

    def before_fork() -> None:
        nonlocal forks
        if forks % FORKS_BETWEEN == 0:
            collapse()
        forks += 1

    if sys.platform == "linux":
        os.register_at_fork(before=before_fork)


def collapse() -> None:
    """Replace the pages of all private memory without a file by huge pages, where possible."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, inode, *_ = line.split()
        start, end = (int(text, 16) for text in addresses.split("-"))
        start, end = -(-start // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
        if mode == "rw-p" and inode == "0" and start < end:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)
