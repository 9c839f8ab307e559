"""The host memory that the checkpoints of all levels of one rank share."""

import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool


class SharedPool:
    """One pool of buffers for several managers, allocated when the first of them is prepared."""

    def __init__(self, buffers: int, chunk_bytes: int, device: torch.device) -> None:
        self._buffers, self.chunk_bytes, self._device = buffers, chunk_bytes, device
        self._pool: ChunkPool | None = None

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is allocated."""
        return self._pool is not None

    @property
    def size(self) -> int:
        """Size of all buffers in bytes."""
        return self._buffers * self.chunk_bytes

    @property
    def buffers(self) -> ChunkPool:
        """The buffers; a CheckpointError is raised if the host has not enough memory for them."""
        if self._pool is None:
            self._pool = ChunkPool(self._buffers, self.chunk_bytes, self._device)
        return self._pool
