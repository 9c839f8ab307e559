"""Buffers that are used again: memory is touched for the first time once, not in every step."""

import torch

from frontier_llm.geometry.message_memory import BUFFER_BYTES


class BufferPool:
    """Lends flat buffers of a device.

    A request takes the smallest free buffer that is large enough and wastes no more than half of
    it; without one a buffer is made. The flows of a step are the same in every step, so the first
    steps make all that there will be.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}
        self.allocated_bytes = 0
        """Of all buffers, lent or free."""

    def take(self, elements: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Borrow [elements] of a dtype; what they hold is undefined."""
        wanted = max(1, elements * dtype.itemsize)
        fitting = [one for one in self._free if wanted <= one.numel() <= 2 * wanted]
        if fitting:
            buffer = min(fitting, key=torch.numel)
            self._free = [one for one in self._free if one is not buffer]
        else:
            size = -(-wanted // BUFFER_BYTES) * BUFFER_BYTES
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.allocated_bytes += size
        self._lent[buffer.data_ptr()] = buffer
        return buffer[: elements * dtype.itemsize].view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what was lent; a tensor that is not of this pool is left alone."""
        buffer = self._lent.pop(tensor.untyped_storage().data_ptr(), None)
        if buffer is not None:
            self._free.append(buffer)
