"""Block quantisation on a GPU of NVIDIA or AMD, in Triton: blockwise.py's bits, in one pass.

A program instance works on one block, as two halves side by side: the i-th elements of both share a
byte in 4 bits. Products and sums must not be fused (`enable_fp_fusion=False`) and the division must
be rounded correctly, or the last bit differs.

Importing this needs Triton; kernels.py does so on a GPU only, and believes it after a proof.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from typing_extensions import override

from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.geometry.formats import Format


@dataclass(frozen=True)
class TritonKernels(BlockKernels):
    """The functions of blockwise.py for tensors of one GPU, on its current stream."""

    name: str = "triton"
    reason: str = "proved on a few blocks"

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
        elements, block = values.numel(), code.block_elements
        _quantise[(triton.cdiv(elements, block),)](
            values,
            residual if residual is not None else values,
            scales,
            packed.view(torch.int8),
            elements,
            seed - (1 << 32) if seed >= 1 << 31 else seed,  # the same bits as a signed number
            block=block,
            half=triton.next_power_of_2(triton.cdiv(block, 2)),
            bits=code.bits,
            largest=code.largest,
            inverse=1 / code.largest,
            bf16_scales=scales.dtype == torch.bfloat16,
            stochastic=code.is_stochastic,
            feedback=residual is not None,
            enable_fp_fusion=False,
        )

    @override
    def dequantise(
        self, scales: torch.Tensor, packed: torch.Tensor, code: Format, out: torch.Tensor
    ) -> None:
        elements, block = out.numel(), code.block_elements
        _dequantise[(triton.cdiv(elements, block),)](
            scales,
            packed.view(torch.int8),
            out,
            elements,
            block=block,
            half=triton.next_power_of_2(triton.cdiv(block, 2)),
            bits=code.bits,
            enable_fp_fusion=False,
        )

    @override
    def add_up(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        code: Format,
        total: torch.Tensor,
        left_out: int,
    ) -> None:
        elements, block = total.numel(), code.block_elements
        _add_up[(triton.cdiv(elements, block),)](
            scales,
            scales.stride(0),
            packed.view(torch.int8),
            packed.stride(0),
            total,
            len(packed),
            left_out,
            elements,
            block=block,
            half=triton.next_power_of_2(triton.cdiv(block, 2)),
            bits=code.bits,
            enable_fp_fusion=False,
        )


@triton.jit
def _places(elements, block: tl.constexpr, half: tl.constexpr):
    """Return where the two halves of this program's block lie, and which elements exist."""
    first = tl.program_id(0).to(tl.int64) * block
    here = tl.minimum(block, elements - first)
    middle = (here + 1) // 2
    i = tl.arange(0, half)
    return first, here, middle, i, i < middle, middle + i < here


@triton.jit
def _magnitude(x):
    """Bits of |x|, which order like the numbers, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded(
    x,
    scale,
    usable,
    number,
    seed,
    largest: tl.constexpr,
    stochastic: tl.constexpr,
):
    """Divide by the scale and round, int32; zeros where the scale is not usable."""
    ratio = x * tl.math.div_rn(1.0, tl.where(usable, scale, 1.0))
    ratio = tl.where(usable, ratio, 0.0)
    if stochastic:
        bits = number.to(tl.uint32) * 0x9E3779B9 + seed.to(tl.uint32, bitcast=True)
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        bits = bits ^ (bits >> 16)
        noise = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        low = tl.floor(ratio + noise)
        return tl.minimum(tl.maximum(low, -largest), largest).to(tl.int32)
    # adding 1.5 * 2^23 rounds to an integer, halves to even
    return (ratio + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _nearest(x, kind: tl.constexpr):
    """Round to bf16, halves to even, if that is the kind; casts then have nothing to round."""
    if kind != tl.bfloat16:
        return x
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(_magnitude(x) < 0x7F800000, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def _lost(x, q, scale):
    """What rounding lost, 0 where that is not finite."""
    lost = x - q.to(tl.float32) * scale
    return tl.where(_magnitude(lost) < 0x7F800000, _nearest(lost, tl.bfloat16), 0.0)


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
    first, _, middle, i, in_low, in_high = _places(elements, block, half)
    low = tl.load(values + first + i, in_low, 0.0).to(tl.float32)
    high = tl.load(values + first + middle + i, in_high, 0.0).to(tl.float32)
    if feedback:
        low += tl.load(residual + first + i, in_low, 0.0).to(tl.float32)
        high += tl.load(residual + first + middle + i, in_high, 0.0).to(tl.float32)
    most = tl.maximum(tl.max(_magnitude(low), 0), tl.max(_magnitude(high), 0))
    finite = most < 0x7F800000
    scale = most.to(tl.float32, bitcast=True) * inverse
    if bf16_scales:
        raised = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
        scale = raised.to(tl.float32, bitcast=True)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    scale = tl.where(finite, scale, float("inf"))
    usable = finite & (scale > 0.0)
    q_low = _rounded(low, scale, usable, first + i, seed, largest, stochastic)
    q_high = _rounded(high, scale, usable, first + middle + i, seed, largest, stochastic)
    tl.store(scales + tl.program_id(0), scale.to(scales.dtype.element_ty))
    if bits == 8:
        tl.store(packed + first + i, q_low.to(tl.int8), in_low)
        tl.store(packed + first + middle + i, q_high.to(tl.int8), in_high)
    else:
        nibbles = (q_low & 15) | (tl.where(in_high, q_high, 0) << 4)
        tl.store(packed + first // 2 + i, nibbles.to(tl.int8), in_low)
    if feedback:
        kind = residual.dtype.element_ty
        tl.store(residual + first + i, _lost(low, q_low, scale).to(kind), in_low)
        tl.store(residual + first + middle + i, _lost(high, q_high, scale).to(kind), in_high)


@triton.jit
def _read(scales, packed, first, middle, i, in_low, in_high, bits: tl.constexpr):
    """Return the two halves of this program's block, fp32."""
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
    first, _, middle, i, in_low, in_high = _places(elements, block, half)
    low, high = _read(scales, packed, first, middle, i, in_low, in_high, bits)
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + first + i, _nearest(low, kind).to(kind), in_low)
    tl.store(out + first + middle + i, _nearest(high, kind).to(kind), in_high)


@triton.jit(do_not_specialize=["left_out"])
def _add_up(
    scales,
    scales_stride,
    packed,
    packed_stride,
    total,
    ranks,
    left_out,
    elements,
    block: tl.constexpr,
    half: tl.constexpr,
    bits: tl.constexpr,
):
    first, _, middle, i, in_low, in_high = _places(elements, block, half)
    low = tl.load(total + first + i, in_low, 0.0)
    high = tl.load(total + first + middle + i, in_high, 0.0)
    for rank in range(ranks):
        if rank != left_out:
            more_low, more_high = _read(scales, packed, first, middle, i, in_low, in_high, bits)
            low += more_low
            high += more_high
        scales += scales_stride  # rank * stride could pass 32 bits
        packed += packed_stride
    tl.store(total + first + i, low, in_low)
    tl.store(total + first + middle + i, high, in_high)
