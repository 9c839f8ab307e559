"""Block quantisation in plain torch: the reference, whose bits faster kernels must reproduce.

blockwise.py defines what is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import override

from frontier_llm.collectives.blockwise import PartKernels
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import Blocks
from frontier_llm.geometry.formats import Format

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number: its reciprocal is finite."""
_UINT32_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class TorchKernels(PartKernels):
    """The reference implementation, for any device."""

    name: str = "torch"
    reason: str = "kernels=torch"

    @override
    def quantise_part(
        self,
        values: torch.Tensor,
        blocks: Blocks,
        residual: Residual | None,
        seed: int,
        base: torch.Tensor | None,
    ) -> None:
        fmt, scales, packed = blocks
        start, byte = 0, 0  # in `values` and in `packed`
        for rows, length in _block_shapes(values.numel(), fmt.block_elements):
            count, size = rows * length, rows * min(length, fmt.block_elements * fmt.bits // 8)
            stop = start + count
            x = values[start:stop].view(rows, length).float()
            if base is not None:
                x = x - base[start:stop].view(rows, length).float()
            first_block = start // fmt.block_elements
            old = None
            if residual is not None:
                old = _read_residual(residual, start, first_block, rows, length)
                x = x + old
            rotated = _rotate(x, fmt)
            scale = _write_scales(rotated, fmt, scales[first_block : first_block + rows])
            integers = _round(rotated, scale, fmt, start, seed)
            packed[byte : byte + size].view(rows, -1).copy_(_pack(integers, fmt))
            if residual is not None and old is not None:
                errors = x - _decode(integers, scale, fmt)
                _write_residual(residual, start, first_block, old, errors)
            start, byte = stop, byte + size

    @override
    def dequantise_part(self, blocks: Blocks, out: torch.Tensor, *, add: bool) -> None:
        for start, integers, scale in _tables(blocks, out.numel()):
            target = out[start : start + integers.numel()].view(integers.shape)
            decoded = _decode(integers.float(), scale, blocks.fmt)
            target.copy_(target.float() + decoded if add else decoded)

    @override
    def add_up_parts(self, blocks: Blocks, total: torch.Tensor, skip: int | None) -> None:
        fmt = blocks.fmt
        sums = torch.zeros_like(total) if fmt.rotation_elements else total
        for rank, row in enumerate(zip(blocks.scales, blocks.packed, strict=True)):
            if rank != skip:
                for start, integers, scale in _tables(Blocks(fmt, *row), total.numel()):
                    summand = integers.float() * scale[:, None]
                    sums[start : start + integers.numel()].view(integers.shape).add_(summand)
        if fmt.rotation_elements:
            start = 0
            for rows, length in _block_shapes(total.numel(), fmt.block_elements):
                stop = start + rows * length
                total[start:stop] += _rotate(sums[start:stop].view(rows, length), fmt).flatten()
                start = stop


def _tables(blocks: Blocks, elements: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield tables of blocks: index of the first element, [rows, length] int8, [rows] scales."""
    fmt, scales, packed = blocks
    start, byte = 0, 0
    for rows, length in _block_shapes(elements, fmt.block_elements):
        size = rows * min(length, fmt.block_elements * fmt.bits // 8)
        first_block = start // fmt.block_elements
        integers = _unpack(packed[byte : byte + size].view(rows, -1), fmt, length)
        yield start, integers, scales[first_block : first_block + rows].float()
        start, byte = start + rows * length, byte + size


def _block_shapes(elements: int, block: int) -> list[tuple[int, int]]:
    """Divide elements into (rows, length) of full blocks and of a shorter last block, if any."""
    full, rest = divmod(elements, block)
    return [(rows, length) for rows, length in ((full, block), (1, rest)) if rows and length]


def _read_residual(
    residual: Residual, start: int, first_block: int, rows: int, length: int
) -> torch.Tensor:
    """Return the residual of a table of blocks, [rows, length] fp32, from element `start` on."""
    values = residual.values[start : start + rows * length].view(rows, length).float()
    if residual.scales is None:
        return values
    return values * residual.scales[first_block : first_block + rows, None].float()


def _write_residual(
    residual: Residual, start: int, first_block: int, old: torch.Tensor, errors: torch.Tensor
) -> None:
    """Overwrite the residual `old` of a table of blocks with that of the next message.

    Both `old` and the rounding errors of this message are [rows, length] fp32.
    """
    if residual.decay:
        old_weight, new_weight = map(_fp32, residual.weights)
        errors = old_weight * old + new_weight * errors
    errors = torch.where(errors.isfinite(), errors, 0.0)
    target = residual.values[start : start + errors.numel()].view(errors.shape)
    if residual.scales is None:
        target.copy_(errors)
        return
    scales = residual.scales[first_block : first_block + len(errors)]
    fmt = Format("int8", scale_bytes=scales.element_size())
    target.copy_(_round(errors, _write_scales(errors, fmt, scales), fmt, 0, 0))


def _transform(rows: torch.Tensor, run: int) -> torch.Tensor:
    """Return the full runs of [rows, length] fp32, each multiplied by the Walsh-Hadamard matrix."""
    x = rows[:, : rows.shape[1] // run * run]
    stride = 1
    while stride < run and x.numel():
        a, b = x.reshape(len(rows), -1, 2, stride).unbind(2)
        x = torch.stack((a + b, a - b), 2).view(x.shape)
        stride *= 2
    return x


def _rotate(rows: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Rotate the full runs of each row, [rows, length] fp32; the rotation is its own inverse."""
    if not fmt.rotation_elements:
        return rows
    sums = _transform(rows, fmt.rotation_elements)
    return torch.cat((sums * _fp32(fmt.rotation_factor), rows[:, sums.shape[1] :]), 1)


def _decode(integers: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the values of [rows, length] integers in fp32 with [rows] scales."""
    if not fmt.rotation_elements:
        return integers * scale[:, None]
    sums = _transform(integers, fmt.rotation_elements)
    run_scale = scale * _fp32(fmt.rotation_factor)
    rest = integers[:, sums.shape[1] :] * scale[:, None]
    return torch.cat((sums * run_scale[:, None], rest), 1)


def _fp32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _write_scales(rows: torch.Tensor, fmt: Format, out: torch.Tensor) -> torch.Tensor:
    """Store the scale of each row in `out`, and return them as [rows] fp32."""
    largest = rows.abs().amax(1)
    scale = largest * _fp32(1 / fmt.largest)
    if out.dtype == torch.bfloat16:  # round up: bf16 is the upper 16 bits of fp32
        scale = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, torch.inf)
    out.copy_(scale)
    return scale


def _round(
    rows: torch.Tensor, scale: torch.Tensor, fmt: Format, first: int, seed: int
) -> torch.Tensor:
    """Divide [rows, length] fp32 by the scales of rows, and round to integral values in fp32.

    `first` is the index of the first element among all values, for stochastic rounding.
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
