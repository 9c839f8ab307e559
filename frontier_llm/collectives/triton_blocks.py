"""Parts of the Triton kernels of triton_blockwise.py: where blocks lie, rounding, the rotation."""

import triton
import triton.language as tl

from frontier_llm.geometry.formats import ALIGNMENT_BYTES, SMALL_BYTES

_ALIGNMENT = tl.constexpr(ALIGNMENT_BYTES)
_SMALL_BYTES = tl.constexpr(SMALL_BYTES)
_MOST_STAGES = tl.constexpr(12)
"""Stages of a transform in half of a block of 8192 elements."""


@triton.jit
def _aligned(count):
    return tl.cdiv(count, _ALIGNMENT) * _ALIGNMENT


@triton.jit
def locate_part(slots, slot_bytes, elements, border, part, scale_type, small_type, block):
    """Return how many elements of a part are quantised, and pointers into its slot (Format.slot).

    These point to the scales, to the small elements and to the integers.
    """
    slot = slots + part * slot_bytes
    quantised = tl.minimum(tl.maximum(border - part * elements, 0), elements)
    small = slot + _aligned(tl.cdiv(quantised, block) * (scale_type.primitive_bitwidth // 8))
    packed = small + _aligned((elements - quantised) * _SMALL_BYTES)
    return (
        quantised.to(tl.int32),
        slot.to(tl.pointer_type(scale_type)),
        small.to(tl.pointer_type(small_type)),
        packed.to(tl.pointer_type(tl.int8)),
    )


@triton.jit
def locate_blocks(block: tl.constexpr, half: tl.constexpr, rows: tl.constexpr):
    """Locate this program's blocks in its part: [rows] indices of blocks, [rows, half] of elements.

    These are of the first and of the second halves. The last result is whether they exist: all do,
    unless half a block is no power of two.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    i = tl.arange(0, half)[None, :]
    first = row[:, None] * block + i
    exists = tl.broadcast_to(i < block // 2, [rows, half])
    return row, first, first + block // 2, exists


@triton.jit
def _copy(source, target, mask):
    x = tl.load(source, mask, 0.0).to(tl.float32)
    tl.store(target, cast(x, target.dtype.element_ty), mask)


@triton.jit
def copy_small(
    values, small, first, second, exists, quantised, elements, program_elements: tl.constexpr
):  # fmt: skip
    """Copy this program's elements of a part that are not quantised, at indices that exist."""
    if (tl.program_id(0) + 1) * program_elements > quantised:
        is_small = exists & (first >= quantised) & (first < elements)
        _copy(values + first, small + (first - quantised), is_small)
        is_small = exists & (second >= quantised) & (second < elements)
        _copy(values + second, small + (second - quantised), is_small)


@triton.jit
def store_integers(
    target, q_low, q_high, first, second, in_low, in_high, halves_before, bits: tl.constexpr
):  # fmt: skip
    """Store int32 integers of the halves of blocks in 8 bits, or two per byte in 4 bits.

    `halves_before`: [rows, 1] elements in half of the blocks before, for 4 bits.
    """
    if bits == 8:
        tl.store(target + first, q_low.to(tl.int8), in_low)
        tl.store(target + second, q_high.to(tl.int8), in_high)
    else:
        nibbles = (q_low & 15) | (q_high << 4)
        tl.store(target + (first - halves_before), nibbles.to(tl.int8), in_low)


@triton.jit
def magnitude(x):
    """Return the bits of |x| as an integer, so that an integer maximum also finds inf and NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scales_of(largest_bits, inverse: tl.constexpr, scale_type: tl.constexpr):
    """Return the scales of blocks, fp32, and whether they are usable (not 0, and finite)."""
    finite = largest_bits < 0x7F800000
    scale = largest_bits.to(tl.float32, bitcast=True) * inverse
    if scale_type == tl.bfloat16:
        rounded_up = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
        scale = rounded_up.to(tl.float32, bitcast=True)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    return tl.where(finite, scale, float("inf")), finite & (scale > 0.0)


@triton.jit
def round_to_integers(
    x, scale, usable, index, seed, largest: tl.constexpr, stochastic: tl.constexpr
):
    """Return x / scale rounded to int32; 0 if the scale is not usable (0 or not finite)."""
    ratio = x * tl.math.div_rn(1.0, tl.where(usable, scale, 1.0))
    ratio = tl.where(usable, ratio, 0.0)
    if stochastic:
        bits = index.to(tl.uint32) * 0x9E3779B9 + seed
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        bits = bits ^ (bits >> 16)
        noise = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        rounded = tl.floor(ratio + noise)
        return tl.minimum(tl.maximum(rounded, -largest), largest).to(tl.int32)
    # adding 1.5 * 2^23 rounds to an integer, halves to even
    return (ratio + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Round fp32 to the nearest value of a dtype, halves to even.

    Casts of Triton to bf16 may round differently, so its bits are computed here.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # without it Triton would also compile the return of another type
        return x.to(dtype)


@triton.jit
def _transform_stage(x, stride: tl.constexpr):
    """Replace the pairs (a, b) of x, [rows, half], that lie a stride apart by (a + b, a - b)."""
    pairs = tl.reshape(x, [x.numel // (2 * stride), 2, stride])
    bits = pairs.to(tl.int32, bitcast=True)
    partner = tl.sum(bits, 1)[:, None, :] - bits  # modulo 2**32: the bits of the other value
    partner = partner.to(tl.float32, bitcast=True)
    is_second = tl.arange(0, 2)[None, :, None] == 1
    return tl.reshape(tl.where(is_second, partner - pairs, partner + pairs), x.shape)


@triton.jit
def scale_and_rotate(
    low, high, first, second, quantised, run_factor, factor, block: tl.constexpr, run: tl.constexpr
):  # fmt: skip
    """Multiply values by a factor, and full runs by the Walsh-Hadamard matrix and `run_factor`.

    The halves of blocks are `low` and `high`, [rows, half] fp32, at the indices `first` and
    `second` of the part, of which `quantised` elements are quantised. `run_factor` is a number or
    [rows, 1]. Runs have `run` elements; 0 = there are no runs.
    """
    if run == 0:
        return low * factor, high * factor
    else:  # without it Triton would also compile the rotation
        x, y = low, high
        for stage in tl.static_range(_MOST_STAGES):
            if (2 << stage) <= run and (2 << stage) <= block // 2:
                x, y = _transform_stage(x, 1 << stage), _transform_stage(y, 1 << stage)
        if run == block:  # the last stage has the halves as pairs
            x, y = x + y, x - y
        # blocks consist of whole runs, so runs begin at multiples of their length
        in_low = (first // run + 1) * run <= quantised
        in_high = (second // run + 1) * run <= quantised
        low = tl.where(in_low, x * run_factor, low * factor)
        high = tl.where(in_high, y * run_factor, high * factor)
        return low, high


@triton.jit
def load_residual(
    residual, scales, in_row, first, second, in_low, in_high, bits: tl.constexpr
):  # fmt: skip
    """Return the residuals of the halves of blocks, [rows, half] fp32.

    Elements at [rows, half] indices `first` and `second` of the part exist `in_low` and `in_high`.
    For int8 (`bits` 8, else 16), blocks have scales at [rows] addresses, which exist `in_row`.
    """
    low = tl.load(residual + first, in_low, 0).to(tl.float32)
    high = tl.load(residual + second, in_high, 0).to(tl.float32)
    if bits == 8:
        scale = tl.load(scales, in_row, 0.0).to(tl.float32)[:, None]
        low *= scale
        high *= scale
    return low, high


@triton.jit
def next_residual(x, decoded, old, old_weight: tl.constexpr, new_weight: tl.constexpr):
    """Return the residual after x was sent as `decoded`; 0 where it is not finite."""
    error = x - decoded
    if old_weight != 0.0:
        error = old * old_weight + error * new_weight
    return tl.where(magnitude(error) < 0x7F800000, error, 0.0)


@triton.jit
def store_residual(
    residual, scales, in_row, first, second, in_low, in_high, bits: tl.constexpr, low, high
):  # fmt: skip
    """Store the residuals `low` and `high`; the other arguments are those of `load_residual`."""
    if bits == 16:
        tl.store(residual + first, cast(low, tl.bfloat16), in_low)
        tl.store(residual + second, cast(high, tl.bfloat16), in_high)
    else:
        # other lanes have no value to send, nor an old residual
        largest_bits = tl.max(tl.maximum(magnitude(low), magnitude(high)), 1)
        scale_type: tl.constexpr = scales.dtype.scalar.element_ty
        scale, usable = scales_of(largest_bits, 1 / 127, scale_type)
        tl.store(scales, scale.to(scale_type), in_row)
        scale, usable = scale[:, None], usable[:, None]
        q_low = round_to_integers(low, scale, usable, first, 0, 127, False)
        q_high = round_to_integers(high, scale, usable, second, 0, 127, False)
        store_integers(residual, q_low, q_high, first, second, in_low, in_high, 0, 8)
