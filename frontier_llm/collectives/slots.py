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
            residual: [m] bf16; see blockwise.quantise.
            seed: see blockwise.quantise.
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

    def add(self, slot: torch.Tensor, quantised: int, out: torch.Tensor) -> None:
        """Add what a slot holds to `out`, [m] fp32."""
        scales, small, packed = self._pieces(slot, out.numel(), quantised)
        out[quantised:].add_(small)
        if quantised:
            self._kernels.dequantise(scales, packed, self._code, out[:quantised], add=True)

    def _pieces(
        self, slot: torch.Tensor, elements: int, quantised: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of scales, small elements and values."""
        layout: Slot = self._code.slot(elements, quantised)
        blocks = -(-quantised // self._code.block_elements)
        scales = slot[: blocks * self._code.scale_bytes].view(self._scale_dtype)
        small = slot[layout.small :][: 2 * (elements - quantised)].view(self._small_dtype)
        return scales, small, slot[layout.values : layout.stop]
