"""Slots: one part of a buffer as a message, in the layout of geometry/formats.py."""

import torch

from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.geometry.formats import Format, Slot


class SlotCodec:
    """Writes parts of buffers into messages and reads them back.

    Elements that are not quantised travel in two bytes: in bf16, or as they are where the model
    computes in fp16.
    """

    def __init__(self, code: Format, kernels: BlockKernels, compute_dtype: torch.dtype) -> None:
        self._code, self._kernels = code, kernels
        self._scale_dtype = torch.float32 if code.scale_bytes == 4 else torch.bfloat16
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
            quantised: how many of its elements, the first ones, become integers.
            slot: [bytes] uint8, overwritten.
            residual: [m] bf16; see BlockKernels.quantise.
            seed: see BlockKernels.quantise.
        """
        scales, small, packed = self._pieces(slot, part.numel(), quantised)
        small.copy_(part[quantised:])
        if quantised:
            kept = None if residual is None else residual[:quantised]
            self._kernels.quantise(part[:quantised], self._code, scales, packed, kept, seed)

    def read(self, slot: torch.Tensor, quantised: int, out: torch.Tensor) -> None:
        """Read a slot into `out`, [m]; arguments as for writing."""
        scales, small, packed = self._pieces(slot, out.numel(), quantised)
        out[quantised:].copy_(small)
        if quantised:
            self._kernels.dequantise(scales, packed, self._code, out[:quantised])

    def add_up(
        self, slots: torch.Tensor, quantised: int, total: torch.Tensor, left_out: int
    ) -> None:
        """Add what slots hold, in their order.

        Args:
            slots: [ranks, bytes] uint8.
            quantised: as for writing.
            total: [m] fp32, added to.
            left_out: a rank whose slot is not read.
        """
        scales, small, packed = self._pieces(slots, total.numel(), quantised)
        for rank, of_rank in enumerate(small):
            if rank != left_out:
                total[quantised:].add_(of_rank)
        if quantised:
            self._kernels.add_up(scales, packed, self._code, total[:quantised], left_out)

    def _pieces(
        self, slots: torch.Tensor, elements: int, quantised: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of scales, small elements and values, of one slot or of many."""
        layout: Slot = self._code.slot(elements, quantised)
        blocks = -(-quantised // self._code.block_elements)
        scales = slots[..., : blocks * self._code.scale_bytes].view(self._scale_dtype)
        small = slots[..., layout.small :][..., : 2 * (elements - quantised)]
        return scales, small.view(self._small_dtype), slots[..., layout.values : layout.stop]
