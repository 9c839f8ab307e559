"""Slots: messages that contain a quantised part of a buffer, and the memory that they lie in.

transport.py sends slots, blockwise.py writes and reads them, and geometry/formats.py describes
their layout: scales, elements that are not quantised, integers.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from frontier_llm.geometry.formats import SMALL_BYTES, Format
from frontier_llm.geometry.state_memory import BUFFER_BYTES


class BufferPool:
    """Lends flat buffers of a device, so that their memory is allocated once and not per step.

    A request takes the smallest free buffer that is large enough, unless it is more than a third
    larger than needed. If there is none, a buffer is allocated, in place of a free one that is only
    a little too small: units of similar sizes share buffers. Every step sends the same messages, so
    the first steps allocate all buffers. `allocated_bytes` is their total size, lent or free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated_bytes = 0
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    def take(self, elements: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Borrow [elements] of a dtype; the contents are undefined."""
        needed_bytes = max(1, elements * dtype.itemsize)
        size = -(-needed_bytes // BUFFER_BYTES) * BUFFER_BYTES
        similar = [free for free in self._free if 0.75 * size <= free.numel() <= size / 0.75]
        large_enough = [free for free in similar if free.numel() >= needed_bytes]
        buffer = min(large_enough or similar, key=torch.numel, default=None)
        self._free = [free for free in self._free if free is not buffer]
        if buffer is None or not large_enough:
            self.allocated_bytes += size - (0 if buffer is None else buffer.numel())
            del buffer, similar  # frees the small buffer before the larger one is allocated
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._lent[buffer.data_ptr()] = buffer
        return buffer[: elements * dtype.itemsize].view(dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """End a loan; does nothing if the tensor was not lent by this pool."""
        buffer = self._lent.pop(tensor.untyped_storage().data_ptr(), None)
        if buffer is not None:
            self._free.append(buffer)


class Blocks(NamedTuple):
    """The quantised elements of a part; in several slots, one row of scales and integers each."""

    fmt: Format
    scales: torch.Tensor
    """[blocks] fp32 or bf16."""
    packed: torch.Tensor
    """[bytes] uint8, the integers."""


@dataclass(frozen=True)
class Slots:
    """A table of slots, one for each part of a buffer, or several of one part.

    Elements that are not quantised are sent in two bytes: as bf16, or as fp16 if the model computes
    in fp16.
    """

    data: torch.Tensor
    """[slots, bytes] uint8, each row contiguous."""
    fmt: Format
    elements: int
    """Number of elements of each part."""
    border: int
    """The elements before this one are quantised, counted from the first element of part 0."""
    small_dtype: torch.dtype
    """Dtype of elements that are not quantised: bf16 or fp16."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales."""
        return torch.float32 if self.fmt.scale_bytes == 4 else torch.bfloat16

    def only(self, part: int) -> "Slots":
        """Return a table with the slot of one part."""
        border = self.border - part * self.elements
        return replace(self, data=self.data[part : part + 1], border=border)

    def sections(self, part: int, *, all_rows: bool = False) -> tuple[int, torch.Tensor, Blocks]:
        """Return the number q of quantised elements of a part, and views of its slot.

        These are the elements from q on, and the blocks of those before. If every row of the table
        contains this part, the views have one more dimension, for `all_rows`.
        """
        quantised = self.fmt.quantised_of(self.border, part * self.elements, self.elements)
        layout = self.fmt.slot(self.elements, quantised)
        slot = self.data if all_rows else self.data[part]
        scale_bytes = -(-quantised // self.fmt.block_elements) * self.fmt.scale_bytes
        small = slot.narrow(-1, layout.small, SMALL_BYTES * (self.elements - quantised))
        scales = slot.narrow(-1, 0, scale_bytes).view(self.scale_dtype)
        packed = slot.narrow(-1, layout.values, layout.stop - layout.values)
        return quantised, small.view(self.small_dtype), Blocks(self.fmt, scales, packed)
