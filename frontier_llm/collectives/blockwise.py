"""Block quantisation in plain torch: the reference that faster kernels must equal to the bit.

Values are cut into blocks that share a scale. Of a block x with largest magnitude m, and Q = 127
or 7 the largest integer,

    scale  s = m / Q, rounded up to bf16 where scales are bf16; 0 where m / Q is below the smallest
           normal number; inf where a value is not finite
    value  q = x / s, rounded to the nearest (halves to even) or stochastically; 0 where s is not
           finite, which reads back as NaN: a gradient that is not finite stays so
    read   q s

so |x - q s| <= s / 2 (< s when stochastic), and zeros are exact. Two 4-bit values share a byte: the
i-th of a block's first half in the low bits, the i-th of its second half in the high ones.

Every operation is one fp32 rounding (a product by 1/Q, a division, a product, a rounding to an
integer), so that C and Triton can do the same.

Source: symmetric blocks as in ZeRO++ (arXiv:2306.10209); the rounding of scales is our own.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from typing_extensions import override

from frontier_llm.geometry.formats import Format

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number: its reciprocal is finite."""
RESIDUAL_DTYPE = torch.bfloat16
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class BlockKernels(ABC):
    """What an implementation must do: the same bits as `TorchKernels`."""

    name: str
    """`torch`, `native` or `triton`."""
    reason: str
    """Why this one: for the log."""

    @abstractmethod
    def quantise(
        self,
        values: torch.Tensor,
        code: Format,
        scales: torch.Tensor,
        packed: torch.Tensor,
        residual: torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """Write values as integers with scales.

        Args:
            values: [n] fp32, bf16 or fp16; read only. n may be anything.
            code: bits, block, rounding.
            scales: [blocks] fp32 or bf16, overwritten.
            packed: [bytes] uint8, overwritten.
            residual: [n] bf16; added to the values first, then overwritten with what rounding
                lost (0 where that is not finite).
            seed: of stochastic rounding, 32 bits; the same seed rounds the same.
        """

    @abstractmethod
    def dequantise(
        self, scales: torch.Tensor, packed: torch.Tensor, code: Format, out: torch.Tensor
    ) -> None:
        """Read back what `quantise` wrote.

        Args:
            scales: as written.
            packed: as written.
            code: as for writing.
            out: [n] fp32, bf16 or fp16, overwritten.
        """

    @abstractmethod
    def add_up(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        code: Format,
        total: torch.Tensor,
        left_out: int,
    ) -> None:
        """Add what ranks have quantised, one after the other.

        Args:
            scales: [ranks, blocks] as written.
            packed: [ranks, bytes] as written.
            code: as for writing.
            total: [n] fp32, added to.
            left_out: a rank that is not added.
        """


@dataclass(frozen=True)
class TorchKernels(BlockKernels):
    """The reference, on any device."""

    name: str = "torch"
    reason: str = "kernels=torch"

    @override
    def quantise(
        self,
        values: torch.Tensor,
        code: Format,
        scales: torch.Tensor,
        packed: torch.Tensor,
        residual: torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        done, written = 0, 0
        for rows, length in _rows(values.numel(), code.block_elements):
            count, held = rows * length, rows * -(-length * code.bits // 8)
            part = values[done : done + count].view(rows, length).float()
            kept = None if residual is None else residual[done : done + count].view(rows, length)
            if kept is not None:
                part = part + kept.float()
            first_block = done // code.block_elements
            scale = _scale(part, code, scales[first_block : first_block + rows])
            integers = _integers(part, scale, code, done, seed)
            packed[written : written + held].view(rows, -1).copy_(_pack(integers, code))
            if kept is not None:
                lost = part - integers * scale[:, None]
                kept.copy_(torch.where(lost.isfinite(), lost, 0.0))
            done, written = done + count, written + held

    @override
    def dequantise(
        self, scales: torch.Tensor, packed: torch.Tensor, code: Format, out: torch.Tensor
    ) -> None:
        done, read = 0, 0
        for rows, length in _rows(out.numel(), code.block_elements):
            count, held = rows * length, rows * -(-length * code.bits // 8)
            integers = _unpack(packed[read : read + held].view(rows, -1), code, length)
            first_block = done // code.block_elements
            scale = scales[first_block : first_block + rows].float()
            out[done : done + count].view(rows, length).copy_(integers.float() * scale[:, None])
            done, read = done + count, read + held

    @override
    def add_up(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        code: Format,
        total: torch.Tensor,
        left_out: int,
    ) -> None:
        for rank, (of_rank, values) in enumerate(zip(scales, packed, strict=True)):
            if rank != left_out:
                wide = torch.empty_like(total)
                self.dequantise(of_rank, values, code, wide)
                total.add_(wide)


def _rows(elements: int, block: int) -> list[tuple[int, int]]:
    """Cut into whole blocks, and a shorter one: (rows, length of a row)."""
    full, rest = divmod(elements, block)
    return [(rows, length) for rows, length in ((full, block), (1, rest)) if rows and length]


def _scale(rows: torch.Tensor, code: Format, home: torch.Tensor) -> torch.Tensor:
    """Return and store a scale for each row, [rows] fp32."""
    largest = rows.abs().amax(1)
    scale = largest * torch.tensor(1 / code.largest, dtype=torch.float32)
    if home.dtype == torch.bfloat16:
        scale = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.inf)
    home.copy_(scale)
    return scale


def _integers(
    rows: torch.Tensor, scale: torch.Tensor, code: Format, first: int, seed: int
) -> torch.Tensor:
    """Divide by the scales and round, [rows, length] fp32 that holds integers."""
    usable = (scale > 0) & scale.isfinite()
    inverse = torch.where(usable, 1 / scale, 0.0)
    ratios = (rows * inverse[:, None]).nan_to_num_(0.0)
    if not code.is_stochastic:
        return ratios.round_()
    noise = uniform(first, rows.numel(), seed, rows.device).view(rows.shape)
    return (ratios + noise).floor_().clamp_(-code.largest, code.largest)


def uniform(first: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return [count] fp32 in [0, 1), a function of the seed and of each element's number alone.

    Source: the 32-bit finaliser "lowbias32" (C. Wellons, Prospecting for Hash Functions, 2018).
    """
    bits = torch.arange(first, first + count, dtype=torch.int64, device=device)
    bits = (bits * 0x9E3779B9 + seed) & _MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * factor) & _MASK
    bits = bits ^ (bits >> 16)
    return (bits >> 8).float() * 2.0**-24


def _pack(integers: torch.Tensor, code: Format) -> torch.Tensor:
    signed = integers.to(torch.int8)
    if code.bits == 8:
        return signed.view(torch.uint8)
    half = -(-signed.shape[1] // 2)
    low, high = signed[:, :half] & 15, torch.zeros_like(signed[:, :half])
    high[:, : signed.shape[1] - half] = signed[:, half:] << 4
    return (low | high).view(torch.uint8)


def _unpack(packed: torch.Tensor, code: Format, length: int) -> torch.Tensor:
    signed = packed.view(torch.int8)
    if code.bits == 8:
        return signed
    low, high = (signed << 4) >> 4, signed >> 4  # shifts of signed numbers keep the sign
    return torch.cat([low, high], 1)[:, :length]
