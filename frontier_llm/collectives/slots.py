"""Slots: messages that contain a quantised part of a buffer, and the memory that they lie in.

transport.py sends slots, and geometry/formats.py describes their layout: scales, elements that are
not quantised, integers. In shapes, m is the number of elements in the part.
"""

from dataclasses import dataclass

import torch

from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.collectives.handles import Handle
from frontier_llm.geometry.formats import Format
from frontier_llm.geometry.message_memory import BUFFER_BYTES


class BufferPool:
    """Lends flat buffers of a device, so that their memory is allocated once and not per step.

    A request takes the smallest free buffer that is large enough, unless it is more than twice as
    large as needed. If there is none, a buffer is allocated. Every step sends the same messages, so
    the first steps allocate all buffers.

    Attributes:
        allocated_bytes: total size of the buffers, lent or free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated_bytes = 0
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    def take(self, elements: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Borrow [elements] of a dtype; the contents are undefined."""
        needed_bytes = max(1, elements * dtype.itemsize)
        fitting = [free for free in self._free if needed_bytes <= free.numel() <= 2 * needed_bytes]
        if fitting:
            buffer = min(fitting, key=torch.numel)
            self._free = [free for free in self._free if free is not buffer]
        else:
            size = -(-needed_bytes // BUFFER_BYTES) * BUFFER_BYTES
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.allocated_bytes += size
        self._lent[buffer.data_ptr()] = buffer
        return buffer[: elements * dtype.itemsize].view(dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """End a loan; does nothing if the tensor was not lent by this pool."""
        buffer = self._lent.pop(tensor.untyped_storage().data_ptr(), None)
        if buffer is not None:
            self._free.append(buffer)


class SlotCodec:
    """Writes parts of buffers into slots and reads them back.

    Elements that are not quantised are sent in two bytes: as bf16, or as fp16 if the model computes
    in fp16.
    """

    def __init__(self, fmt: Format, kernels: BlockKernels, compute_dtype: torch.dtype) -> None:
        self._fmt, self._kernels = fmt, kernels
        self._scale_dtype = torch.float32 if fmt.scale_bytes == 4 else torch.bfloat16
        self._small_dtype = torch.float16 if compute_dtype == torch.float16 else torch.bfloat16

    def write(
        self,
        part: torch.Tensor,
        quantised: int,
        slot: torch.Tensor,
        residual: torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """Write a part into a slot.

        Args:
            part: [m], read only.
            quantised: number of leading elements that are quantised.
            slot: [bytes] uint8, overwritten.
            residual: [m] bf16; see BlockKernels.quantise.
            seed: see BlockKernels.quantise.
        """
        scales, small, packed = self._views(slot, part.numel(), quantised)
        small.copy_(part[quantised:])
        if quantised:
            errors = None if residual is None else residual[:quantised]
            self._kernels.quantise(part[:quantised], self._fmt, scales, packed, errors, seed)

    def read(self, slot: torch.Tensor, quantised: int, out: torch.Tensor) -> None:
        """Read the part in a slot into `out`, [m]; the other arguments are those of `write`."""
        scales, small, packed = self._views(slot, out.numel(), quantised)
        out[quantised:].copy_(small)
        if quantised:
            self._kernels.dequantise(scales, packed, self._fmt, out[:quantised])

    def add_up(self, slots: torch.Tensor, quantised: int, total: torch.Tensor, skip: int) -> None:
        """Add the contents of slots to a total, in their order.

        Args:
            slots: [ranks, bytes] uint8.
            quantised: number of leading elements of each part that are quantised.
            total: [m] fp32, added to.
            skip: index of a slot that is not read.
        """
        scales, small, packed = self._views(slots, total.numel(), quantised)
        for rank, unquantised in enumerate(small):
            if rank != skip:
                total[quantised:].add_(unquantised)
        if quantised:
            self._kernels.add_up(scales, packed, self._fmt, total[:quantised], skip)

    def _views(
        self, slots: torch.Tensor, elements: int, quantised: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of the scales, unquantised elements and packed values of one or more slots.

        Args:
            slots: [..., bytes] uint8.
            elements: number of elements of the part in each slot.
            quantised: number of leading elements of each part that are quantised.
        """
        layout = self._fmt.slot(elements, quantised)
        blocks = -(-quantised // self._fmt.block_elements)
        scales = slots[..., : blocks * self._fmt.scale_bytes].view(self._scale_dtype)
        small = slots[..., layout.small :][..., : 2 * (elements - quantised)]
        return scales, small.view(self._small_dtype), slots[..., layout.values : layout.stop]


@dataclass
class SlotSum:
    """The `Handle` of a quantised reduce-scatter: an exchange of slots, whose contents are summed.

    In shapes, m is the number of elements of the part that this rank sums.
    """

    work: Handle
    """The exchange."""
    codec: SlotCodec
    """Decodes the slots."""
    quantised: int
    """Number of quantised elements in each received slot."""
    position: int
    """This rank's index in the group; its own slot is not used."""
    sent: torch.Tensor
    """[ranks, bytes] uint8: the slots that this rank sends, borrowed from the pool."""
    received: torch.Tensor
    """[ranks, bytes] uint8: the slots that arrive, borrowed from the pool."""
    total: torch.Tensor
    """[m] fp32: at first this rank's own summand, not rounded; borrowed from the pool."""
    pool: BufferPool
    """`wait` returns the slots to this pool."""

    def wait(self) -> torch.Tensor:
        """Return [m] fp32: the sum over the group in rank order, borrowed from the pool."""
        self.work.wait()
        self.codec.add_up(self.received, self.quantised, self.total, self.position)
        self.pool.give_back(self.sent)
        self.pool.give_back(self.received)
        return self.total
