"""Host memory for chunks: allocated and touched once, page by page, and lent piece by piece.

The memory is private, on huge pages where the system has them, and aligned as O_DIRECT wants it.
For states on a GPU it is registered with the driver (pinned), so that copies run beside the
computation.
"""

import contextlib
import mmap
import weakref

import torch

from frontier_llm.errors import CheckpointError
from frontier_llm.units import format_bytes


class Pool:
    """Buffers of one chunk each. Not for two threads at once: the snapshot's lock guards it."""

    def __init__(self, slots: int, chunk_bytes: int, device: torch.device) -> None:
        """Allocate.

        Args:
            slots: number of buffers; none needs no memory.
            chunk_bytes: size of each, a multiple of a page.
            device: where the states are.

        Raises:
            CheckpointError: there is no memory for it.
        """
        self.size = size = slots * chunk_bytes
        self._free: list[torch.Tensor] = []
        if not slots:
            return
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CheckpointError(
                f"no host memory for checkpoints ({format_bytes(size)} a rank): {error.strerror}"
            ) from None
        with contextlib.suppress(AttributeError, OSError):  # not on every kernel
            self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        memory.zero_()  # the first touch is the slow one
        if device.type != "cpu":
            _pin(memory)
            weakref.finalize(self, _unpin, memory)
        self._free += list(memory.split(chunk_bytes))

    @property
    def has_free(self) -> bool:
        """Whether `take` would lend a buffer."""
        return bool(self._free)

    def take(self) -> torch.Tensor | None:
        """Lend a buffer: [chunk_bytes] uint8; None if all are lent."""
        return self._free.pop() if self._free else None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._free.append(buffer)


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _pin(memory: torch.Tensor) -> None:
    """Let the GPU copy here without a detour. Not tested: no GPU was at hand."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status):
        raise CheckpointError(
            f"the driver does not pin {format_bytes(memory.numel())} of host memory for "
            f"checkpoints (error {int(status)}); is the limit of locked memory (ulimit -l) low?"
        )
