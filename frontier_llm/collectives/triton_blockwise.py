"""Block quantisation in Triton, on NVIDIA and AMD GPUs: the bits of blockwise.py, in one pass.

Each program instance works on one block, in two halves ("low" and "high"), because 4-bit values are
packed so that the i-th elements of both halves share a byte. Products and sums must not be fused
(`enable_fp_fusion=False`) and the division must be rounded correctly; otherwise the last bit of a
result could differ from the reference.

Importing this module needs Triton; kernel_choice.py imports it on a GPU only and verifies the bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from typing_extensions import override

from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.geometry.formats import Format

LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 1}
"""A block has 256 elements, so one warp has enough work, and its maximum needs no shared memory."""


@dataclass(frozen=True)
class TritonKernels(BlockKernels):
    """The kernels below, run on the tensors' GPU and its current stream."""

    name: str = "triton"
    reason: str = "verified on a few blocks"

    @override
    def quantise(
        self,
        values: torch.Tensor,
        fmt: Format,
        scales: torch.Tensor,
        packed: torch.Tensor,
        residual: torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        elements, block = values.numel(), fmt.block_elements
        _quantise[(triton.cdiv(elements, block),)](
            values,
            residual if residual is not None else values,
            scales,
            packed.view(torch.int8),
            elements,
            seed - (1 << 32) if seed >= 1 << 31 else seed,  # the seed's bits as a signed number
            block=block,
            half=triton.next_power_of_2(triton.cdiv(block, 2)),
            bits=fmt.bits,
            largest=fmt.largest,
            inverse=1 / fmt.largest,
            bf16_scales=scales.dtype == torch.bfloat16,
            stochastic=fmt.is_stochastic,
            feedback=residual is not None,
            **LAUNCH_OPTIONS,
        )

    @override
    def dequantise(
        self, scales: torch.Tensor, packed: torch.Tensor, fmt: Format, out: torch.Tensor
    ) -> None:
        elements, block = out.numel(), fmt.block_elements
        _dequantise[(triton.cdiv(elements, block),)](
            scales,
            packed.view(torch.int8),
            out,
            elements,
            block=block,
            half=triton.next_power_of_2(triton.cdiv(block, 2)),
            bits=fmt.bits,
            **LAUNCH_OPTIONS,
        )

    @override
    def add_up(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        fmt: Format,
        total: torch.Tensor,
        skip: int,
    ) -> None:
        elements, block = total.numel(), fmt.block_elements
        _add_up[(triton.cdiv(elements, block),)](
            scales,
            scales.stride(0),
            packed.view(torch.int8),
            packed.stride(0),
            total,
            len(packed),
            skip,
            elements,
            block=block,
            half=triton.next_power_of_2(triton.cdiv(block, 2)),
            bits=fmt.bits,
            **LAUNCH_OPTIONS,
        )


@triton.jit
def _block_bounds(elements, block: tl.constexpr, half: tl.constexpr):
    """Locate the two halves of this program's block.

    Returns:
        The block's first element, its number of elements, the first element of its second half
        within the block, [half] indices, and masks of the indices that exist in each half.
    """
    first = tl.program_id(0).to(tl.int64) * block
    count = tl.minimum(block, elements - first)
    middle = (count + 1) // 2
    i = tl.arange(0, half)
    return first, count, middle, i, i < middle, middle + i < count


@triton.jit
def _magnitude(x):
    """Return the bits of |x| as an integer, so that an integer maximum also finds inf and NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round(
    x,
    scale,
    usable,
    index,
    seed,
    largest: tl.constexpr,
    stochastic: tl.constexpr,
):
    """Return x / scale rounded to int32; 0 if the scale is not usable (0 or not finite)."""
    ratio = x * tl.math.div_rn(1.0, tl.where(usable, scale, 1.0))
    ratio = tl.where(usable, ratio, 0.0)
    if stochastic:
        bits = index.to(tl.uint32) * 0x9E3779B9 + seed.to(tl.uint32, bitcast=True)
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        bits = bits ^ (bits >> 16)
        noise = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        rounded = tl.floor(ratio + noise)
        return tl.minimum(tl.maximum(rounded, -largest), largest).to(tl.int32)
    # adding 1.5 * 2^23 rounds to an integer, halves to even
    return (ratio + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _to_nearest(x, dtype: tl.constexpr):
    """Round fp32 to the nearest bf16 value (halves to even) if `dtype` is bf16.

    Casts to bf16 may round differently; after this function they have nothing to round.
    """
    if dtype != tl.bfloat16:
        return x
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(_magnitude(x) < 0x7F800000, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def _rounding_error(x, q, scale):
    """Return x - q * scale, or 0 where this is not finite."""
    error = x - q.to(tl.float32) * scale
    return tl.where(_magnitude(error) < 0x7F800000, _to_nearest(error, tl.bfloat16), 0.0)


@triton.jit(do_not_specialize=["seed"])
def _quantise(
    values,
    residual,
    scales,
    packed,
    elements,
    seed,
    block: tl.constexpr,
    half: tl.constexpr,
    bits: tl.constexpr,
    largest: tl.constexpr,
    inverse: tl.constexpr,
    bf16_scales: tl.constexpr,
    stochastic: tl.constexpr,
    feedback: tl.constexpr,
):
    """Quantise this program's block; `feedback` says whether `residual` is read and written."""
    first, _, middle, i, in_low, in_high = _block_bounds(elements, block, half)
    low = tl.load(values + first + i, in_low, 0.0).to(tl.float32)
    high = tl.load(values + first + middle + i, in_high, 0.0).to(tl.float32)
    if feedback:
        low += tl.load(residual + first + i, in_low, 0.0).to(tl.float32)
        high += tl.load(residual + first + middle + i, in_high, 0.0).to(tl.float32)
    largest_bits = tl.maximum(tl.max(_magnitude(low), 0), tl.max(_magnitude(high), 0))
    finite = largest_bits < 0x7F800000
    scale = largest_bits.to(tl.float32, bitcast=True) * inverse
    if bf16_scales:
        rounded_up = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
        scale = rounded_up.to(tl.float32, bitcast=True)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    scale = tl.where(finite, scale, float("inf"))
    usable = finite & (scale > 0.0)
    q_low = _round(low, scale, usable, first + i, seed, largest, stochastic)
    q_high = _round(high, scale, usable, first + middle + i, seed, largest, stochastic)
    tl.store(scales + tl.program_id(0), scale.to(scales.dtype.element_ty))
    if bits == 8:
        tl.store(packed + first + i, q_low.to(tl.int8), in_low)
        tl.store(packed + first + middle + i, q_high.to(tl.int8), in_high)
    else:
        nibbles = (q_low & 15) | (tl.where(in_high, q_high, 0) << 4)
        tl.store(packed + first // 2 + i, nibbles.to(tl.int8), in_low)
    if feedback:
        dtype = residual.dtype.element_ty
        tl.store(residual + first + i, _rounding_error(low, q_low, scale).to(dtype), in_low)
        tl.store(
            residual + first + middle + i, _rounding_error(high, q_high, scale).to(dtype), in_high
        )


@triton.jit
def _dequantise_block(scales, packed, first, middle, i, in_low, in_high, bits: tl.constexpr):
    """Return the values of the two halves of this program's block, fp32."""
    scale = tl.load(scales + tl.program_id(0)).to(tl.float32)
    if bits == 8:
        q_low = tl.load(packed + first + i, in_low, 0).to(tl.int32)
        q_high = tl.load(packed + first + middle + i, in_high, 0).to(tl.int32)
    else:
        both = tl.load(packed + first // 2 + i, in_low, 0).to(tl.int32)
        q_low = (both << 28) >> 28  # a shift of a signed number keeps the sign
        q_high = both >> 4
    return q_low.to(tl.float32) * scale, q_high.to(tl.float32) * scale


@triton.jit
def _dequantise(
    scales,
    packed,
    out,
    elements,
    block: tl.constexpr,
    half: tl.constexpr,
    bits: tl.constexpr,
):
    """Dequantise this program's block."""
    first, _, middle, i, in_low, in_high = _block_bounds(elements, block, half)
    low, high = _dequantise_block(scales, packed, first, middle, i, in_low, in_high, bits)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + first + i, _to_nearest(low, dtype).to(dtype), in_low)
    tl.store(out + first + middle + i, _to_nearest(high, dtype).to(dtype), in_high)


@triton.jit(do_not_specialize=["skip"])
def _add_up(
    scales,
    scales_stride,
    packed,
    packed_stride,
    total,
    ranks,
    skip,
    elements,
    block: tl.constexpr,
    half: tl.constexpr,
    bits: tl.constexpr,
):
    """Add this program's block of all ranks but `skip` to `total`."""
    first, _, middle, i, in_low, in_high = _block_bounds(elements, block, half)
    low = tl.load(total + first + i, in_low, 0.0)
    high = tl.load(total + first + middle + i, in_high, 0.0)
    for rank in range(ranks):
        if rank != skip:
            rank_low, rank_high = _dequantise_block(
                scales, packed, first, middle, i, in_low, in_high, bits
            )
            low += rank_low
            high += rank_high
        scales += scales_stride  # advance the pointer: rank * stride could exceed 32 bits
        packed += packed_stride
    tl.store(total + first + i, low, in_low)
    tl.store(total + first + middle + i, high, in_high)
