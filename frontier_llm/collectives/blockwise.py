"""Block quantisation in plain torch: the reference, whose bits faster kernels must reproduce.

Values are divided into blocks; the values of a block share a scale. For a value x of a block with
largest magnitude m, and the largest integer Q (127 for 8 bits, 7 for 4 bits):

    scale       s = m / Q, rounded up to bf16 if scales are bf16. It is 0 if m / Q is below the
                smallest normal number, and inf if a value is not finite.
    quantise    q = x / s, rounded to nearest (halves to even) or stochastically. It is 0 if s is
                0 or not finite.
    dequantise  q s, the product. If s is inf, q is 0 and the product is NaN, so a block with a
                gradient that is not finite stays not finite.

Hence |x - q s| <= s / 2 (< s if stochastic), and zeros are exact. Two 4-bit values share a byte:
the i-th of a block's first half is in the low bits, the i-th of its second half in the high bits.
The halves of a block that is shorter than the others have the same border, so the second half is
shorter or empty.

Every operation is rounded once to fp32 (a product by 1/Q, a division, a product, a rounding to an
integer), so that C and Triton can reproduce it.

Source: symmetric blocks as in ZeRO++ (arXiv:2306.10209); the rounding of scales differs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from typing_extensions import override

from frontier_llm.collectives.slots import Slots
from frontier_llm.geometry.formats import Format

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number: its reciprocal is finite."""
RESIDUAL_DTYPE = torch.bfloat16
"""Dtype in which rounding errors are kept for error feedback."""
PART_SEED_STRIDE = 0xC2B2AE3D
"""Difference between the rounding seeds of neighbouring parts: odd, so that they lie far apart."""
_UINT32_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class BlockKernels(ABC):
    """Interface of the implementations; all produce the same bits as `TorchKernels`."""

    name: str
    """`torch`, `native` or `triton`."""
    reason: str
    """Why this implementation was chosen, for the log."""

    @abstractmethod
    def quantise(
        self,
        parts: torch.Tensor,
        slots: Slots,
        residual: torch.Tensor | None = None,
        seed: int = 0,
        skip: int | None = None,
    ) -> None:
        """Write each part of a buffer into its slot.

        Args:
            parts: [parts, m] fp32, bf16 or fp16, contiguous, read only.
            slots: [parts, bytes], overwritten.
            residual: [parts, m] bf16. The residual of an element that is quantised is added to it
                first, then overwritten with its rounding error (0 where this is not finite).
            seed: 32-bit seed of stochastic rounding of the first part that is written. From each
                written part to the next it grows by PART_SEED_STRIDE, modulo 2**32.
            skip: index of a part that is not written.
        """

    @abstractmethod
    def dequantise(self, slots: Slots, parts: torch.Tensor) -> None:
        """Read each part of a buffer from its slot, as written by `quantise`.

        Args:
            slots: [parts, bytes].
            parts: [parts, m] fp32, bf16 or fp16, contiguous, overwritten.
        """

    @abstractmethod
    def add_up(self, slots: Slots, total: torch.Tensor, skip: int | None = None) -> None:
        """Add the parts in slots to a total, in the order of the slots.

        Args:
            slots: [ranks, bytes]; every slot contains part 0 of the table, from another rank.
            total: [m] fp32, added to.
            skip: index of a slot that is not added.
        """


class PartKernels(BlockKernels):
    """Kernels that process one part per call, as on a CPU, where a call costs little."""

    @override
    def quantise(
        self,
        parts: torch.Tensor,
        slots: Slots,
        residual: torch.Tensor | None = None,
        seed: int = 0,
        skip: int | None = None,
    ) -> None:
        for i in range(len(parts)):
            if i == skip:
                continue
            quantised, scales, small, packed = slots.sections(i)
            if quantised < slots.elements:
                small.copy_(parts[i, quantised:])
            if quantised:
                errors = None if residual is None else residual[i, :quantised]
                values = parts[i, :quantised]
                self.quantise_part(values, slots.fmt, scales, packed, errors, seed)
            seed = (seed + PART_SEED_STRIDE) & _UINT32_MASK

    @override
    def dequantise(self, slots: Slots, parts: torch.Tensor) -> None:
        for i, out in enumerate(parts):
            quantised, scales, small, packed = slots.sections(i)
            if quantised < slots.elements:
                out[quantised:].copy_(small)
            if quantised:
                self.dequantise_part(scales, packed, slots.fmt, out[:quantised])

    @override
    def add_up(self, slots: Slots, total: torch.Tensor, skip: int | None = None) -> None:
        quantised, scales, small, packed = slots.sections(0, all_rows=True)
        for i, unquantised in enumerate(small if quantised < slots.elements else ()):
            if i != skip:
                total[quantised:].add_(unquantised)
        if quantised:
            self.add_up_parts(scales, packed, slots.fmt, total[:quantised], skip)

    @abstractmethod
    def quantise_part(
        self,
        values: torch.Tensor,
        fmt: Format,
        scales: torch.Tensor,
        packed: torch.Tensor,
        residual: torch.Tensor | None,
        seed: int,
    ) -> None:
        """Quantise the first elements of a part.

        Args:
            values: [n], n at least 1.
            fmt: bits, block size and rounding.
            scales: [blocks] fp32 or bf16, overwritten.
            packed: [bytes] uint8, overwritten.
            residual: [n]; see `quantise`.
            seed: 32-bit seed of stochastic rounding.
        """

    @abstractmethod
    def dequantise_part(
        self, scales: torch.Tensor, packed: torch.Tensor, fmt: Format, out: torch.Tensor
    ) -> None:
        """Dequantise into `out`, [n]; the other arguments are those of `quantise_part`."""

    @abstractmethod
    def add_up_parts(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        fmt: Format,
        total: torch.Tensor,
        skip: int | None,
    ) -> None:
        """Dequantise rows of `scales` and `packed`, and add them to `total`, [n] fp32."""


@dataclass(frozen=True)
class TorchKernels(PartKernels):
    """The reference implementation, for any device."""

    name: str = "torch"
    reason: str = "kernels=torch"

    @override
    def quantise_part(
        self,
        values: torch.Tensor,
        fmt: Format,
        scales: torch.Tensor,
        packed: torch.Tensor,
        residual: torch.Tensor | None,
        seed: int,
    ) -> None:
        start, byte = 0, 0  # in `values` and in `packed`
        for rows, length in _block_shapes(values.numel(), fmt.block_elements):
            count, size = rows * length, rows * min(length, fmt.block_elements * fmt.bits // 8)
            stop = start + count
            blocks = values[start:stop].view(rows, length).float()
            errors = None if residual is None else residual[start:stop].view(rows, length)
            if errors is not None:
                blocks = blocks + errors.float()
            first_block = start // fmt.block_elements
            scale = _write_scales(blocks, fmt, scales[first_block : first_block + rows])
            integers = _round(blocks, scale, fmt, start, seed)
            packed[byte : byte + size].view(rows, -1).copy_(_pack(integers, fmt))
            if errors is not None:
                new_errors = blocks - integers * scale[:, None]
                errors.copy_(torch.where(new_errors.isfinite(), new_errors, 0.0))
            start, byte = stop, byte + size

    @override
    def dequantise_part(
        self, scales: torch.Tensor, packed: torch.Tensor, fmt: Format, out: torch.Tensor
    ) -> None:
        start, byte = 0, 0  # in `out` and in `packed`
        for rows, length in _block_shapes(out.numel(), fmt.block_elements):
            count, size = rows * length, rows * min(length, fmt.block_elements * fmt.bits // 8)
            stop = start + count
            integers = _unpack(packed[byte : byte + size].view(rows, -1), fmt, length)
            first_block = start // fmt.block_elements
            scale = scales[first_block : first_block + rows].float()
            out[start:stop].view(rows, length).copy_(integers.float() * scale[:, None])
            start, byte = stop, byte + size

    @override
    def add_up_parts(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        fmt: Format,
        total: torch.Tensor,
        skip: int | None,
    ) -> None:
        for rank, (rank_scales, rank_packed) in enumerate(zip(scales, packed, strict=True)):
            if rank != skip:
                summand = torch.empty_like(total)
                self.dequantise_part(rank_scales, rank_packed, fmt, summand)
                total.add_(summand)


def _block_shapes(elements: int, block: int) -> list[tuple[int, int]]:
    """Divide elements into one table of full blocks and one of a shorter last block.

    Returns:
        (rows, row length) of each table, with one block per row; empty tables are left out.
    """
    full, rest = divmod(elements, block)
    return [(rows, length) for rows, length in ((full, block), (1, rest)) if rows and length]


def _write_scales(rows: torch.Tensor, fmt: Format, out: torch.Tensor) -> torch.Tensor:
    """Store the scale of each row in `out`, and return them as [rows] fp32."""
    largest = rows.abs().amax(1)
    scale = largest * torch.tensor(1 / fmt.largest, dtype=torch.float32)
    if out.dtype == torch.bfloat16:  # round up: bf16 is the upper 16 bits of fp32
        scale = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.inf)
    out.copy_(scale)
    return scale


def _round(
    rows: torch.Tensor, scale: torch.Tensor, fmt: Format, first: int, seed: int
) -> torch.Tensor:
    """Divide rows by their scales and round.

    Args:
        rows: [rows, length] fp32.
        scale: [rows] fp32.
        fmt: largest integer and rounding.
        first: index of the first element among all values, for stochastic rounding.
        seed: 32-bit seed of stochastic rounding.

    Returns:
        [rows, length] fp32 with integral values.
    """
    usable = (scale > 0) & scale.isfinite()
    inverse = torch.where(usable, 1 / scale, 0.0)
    ratios = (rows * inverse[:, None]).nan_to_num_(0.0)
    if not fmt.is_stochastic:
        return ratios.round_()
    noise = uniform(first, rows.numel(), seed, rows.device).view(rows.shape)
    return (ratios + noise).floor_().clamp_(-fmt.largest, fmt.largest)


def uniform(first: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return [count] pseudo-random fp32 numbers in [0, 1).

    Each is a function of the seed and of its index, which counts from `first`.

    Source: the 32-bit finaliser "lowbias32" (C. Wellons, Prospecting for Hash Functions, 2018).
    """
    bits = torch.arange(first, first + count, dtype=torch.int64, device=device)
    bits = (bits * 0x9E3779B9 + seed) & _UINT32_MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * factor) & _UINT32_MASK
    bits = bits ^ (bits >> 16)
    return (bits >> 8).float() * 2.0**-24


def _pack(integers: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Write [rows, length] integral values as [rows, bytes] uint8."""
    signed = integers.to(torch.int8)
    if fmt.bits == 8:
        return signed.view(torch.uint8)
    half = fmt.block_elements // 2
    packed = signed[:, :half] & 15
    packed[:, : max(0, signed.shape[1] - half)] |= signed[:, half:] << 4
    return packed.view(torch.uint8)


def _unpack(packed: torch.Tensor, fmt: Format, length: int) -> torch.Tensor:
    """Read [rows, bytes] uint8 as [rows, length] int8."""
    signed = packed.view(torch.int8)
    if fmt.bits == 8:
        return signed
    low, high = (signed << 4) >> 4, signed >> 4  # shifts of signed numbers keep the sign
    return torch.cat([low, high], 1)[:, :length]
