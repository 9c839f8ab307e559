"""Host memory into which `snapshot` copies states before the optimizer changes them.

The memory is divided into buffers of one chunk each. A chunk is the part of a checkpoint file that
is written at once (16 MiB by default). The memory is allocated once per run. It is private to the
process, on huge pages where the system has them, and aligned for O_DIRECT. For states on a GPU it
is registered with the driver (pinned), so that copies overlap with computation.
"""

import contextlib
import mmap
import threading
import weakref
from functools import cached_property, partial

import psutil
import torch

from frontier_llm.errors import CheckpointError
from frontier_llm.units import format_bytes


class ChunkPool:
    """A fixed number of buffers of one chunk each.

    Every page is touched at once. A CheckpointError is raised if the host has not enough memory.
    `changed` is held while buffers or snapshots that use the pool change, and notified after that.
    Several snapshots may share a pool, so a buffer that one returns wakes the others.
    """

    def __init__(self, buffers: int, chunk_bytes: int, device: torch.device) -> None:
        self.size = size = buffers * chunk_bytes
        self.changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        if not buffers:
            return
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CheckpointError(
                f"no host memory for checkpoints ({format_bytes(size)} per rank): {error.strerror}"
            ) from None
        with contextlib.suppress(AttributeError, OSError):  # not every kernel has huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        memory.zero_()  # page faults happen now and not during the first checkpoint
        if device.type != "cpu":
            _pin(memory)
            weakref.finalize(self, _unpin, memory)
        self._free += list(memory.split(chunk_bytes))

    @property
    def has_free(self) -> bool:
        """Whether `take` would return a buffer."""
        return bool(self._free)

    def take(self) -> torch.Tensor | None:
        """Return a free buffer, [chunk_bytes] uint8, or None if all buffers are in use."""
        with self.changed:
            return self._free.pop() if self._free else None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Mark a buffer as free again, and wake the threads that wait for one."""
        with self.changed:
            self._free.append(buffer)
            self.changed.notify_all()


def host_buffer(size: int) -> torch.Tensor:
    """Return a page-aligned buffer, [size] uint8; the size is a multiple of 4096 (a page)."""
    buffer = ChunkPool(1, size, torch.device("cpu")).take()
    assert buffer is not None
    return buffer


def check_host_memory(needed: int, ranks_on_host: int) -> None:
    """Refuse pools of `needed` bytes on each rank of this host that its free memory cannot hold."""
    free = psutil.virtual_memory().available
    if needed * ranks_on_host > free:
        raise CheckpointError(
            f"checkpoints need {format_bytes(needed)} of host memory on each of the "
            f"{ranks_on_host} ranks of a node, {format_bytes(needed * ranks_on_host)} in all; "
            f"{format_bytes(free)} is free. Set checkpoint.pool_bytes to less (the update then "
            "waits for the disk), or cut the optimizer states over more ranks"
        )


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _pin(memory: torch.Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status):
        raise CheckpointError(
            f"the driver does not pin {format_bytes(memory.numel())} of host memory for "
            f"checkpoints (error {int(status)}); is the limit of locked memory (ulimit -l) low?"
        )


class SharedPool:
    """One pool of buffers for several managers, allocated when the first of them is prepared."""

    def __init__(self, buffers: int, chunk_bytes: int, device: torch.device) -> None:
        self.size, self.chunk_bytes = buffers * chunk_bytes, chunk_bytes
        self._allocate = partial(ChunkPool, buffers, chunk_bytes, device)

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is allocated."""
        return "buffers" in vars(self)

    @cached_property
    def buffers(self) -> ChunkPool:
        """The buffers; a CheckpointError is raised if the host has not enough memory for them."""
        return self._allocate()
