"""Block quantisation in Triton, on NVIDIA and AMD GPUs: gives the same bits as blockwise.py.

One launch processes all parts of a message. Each program instance works on neighbouring blocks of
one part and computes from the border how many elements of the part are quantised. It copies its
elements that are not quantised. Blocks are processed in two halves ("low" and "high"), because
4-bit values are packed so that the i-th elements of both halves share a byte.

Loads and stores are vectorised if the number of elements of a part and the border are multiples of
16, as in models whose widths are multiples of 16.

Products and sums must not be fused (`enable_fp_fusion=False`) and the division must be rounded
correctly; otherwise the last bit of a result could differ from the reference.

Importing this module needs Triton; kernel_choice.py imports it on a GPU only and verifies the bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from typing_extensions import override

from frontier_llm.collectives.blockwise import PART_SEED_STRIDE, BlockKernels
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import Slots
from frontier_llm.collectives.triton_blocks import (
    cast,
    copy_small,
    load_residual,
    locate_blocks,
    locate_part,
    magnitude,
    next_residual,
    round_to_integers,
    scale_and_rotate,
    scales_of,
    store_integers,
    store_residual,
)
from frontier_llm.geometry.formats import Format

LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
PROGRAM_ELEMENTS = 4096
"""Elements per program instance.

A GPU reaches its memory bandwidth if enough bytes are in flight: bandwidth times latency, for an
H200 4.8 TB/s x 0.8 us / 132 = 29 KB per multiprocessor. 4096 elements are 32 per thread, so that
each half of them is one load of 16 bytes in int8, and two in bf16. With the 51 registers that sm_90
needs for int8 and bf16, 9 programs fit on a multiprocessor. They read 9 x 8 KiB to quantise, and
9 x 4 KiB to dequantise. The sum needs 96 registers: 5 programs read 20 KiB per rank. AMD's
wavefronts have 64 threads, so a thread has 16 elements, and 14 KB suffice (1.6 TB/s x 1 us / 110).
These are estimates; nothing was measured on a GPU."""

_STRIDE = tl.constexpr(PART_SEED_STRIDE)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class TritonKernels(BlockKernels):
    """The kernels below, run on the tensors' GPU and its current stream."""

    name: str = "triton"
    reason: str = "verified on a few blocks"

    @override
    def quantise(
        self,
        parts: torch.Tensor,
        slots: Slots,
        residual: Residual | None = None,
        seed: int = 0,
        skip: int | None = None,
        base: torch.Tensor | None = None,
    ) -> None:
        constants, errors = _constants(slots), parts
        if residual is not None:
            residual.assert_fits(parts, slots.fmt.block_elements)
            errors = residual.values
        _quantise[_grid(slots, constants, len(parts))](
            parts,
            parts if base is None else base,
            errors,
            errors if residual is None or residual.scales is None else residual.scales,
            *_arguments(slots),
            len(parts) if skip is None else skip,  # no part has this index
            seed - (1 << 32) if seed >= 1 << 31 else seed,  # the seed's bits as a signed number
            largest=slots.fmt.largest,
            inverse=1 / slots.fmt.largest,
            stochastic=slots.fmt.is_stochastic,
            difference=base is not None,
            **residual_constants(residual),
            **constants,
            **LAUNCH_OPTIONS,
        )

    @override
    def dequantise(self, slots: Slots, parts: torch.Tensor, *, add: bool = False) -> None:
        constants = _constants(slots)
        grid = _grid(slots, constants, len(parts))
        _dequantise[grid](parts, *_arguments(slots), add=add, **constants, **LAUNCH_OPTIONS)

    @override
    def add_up(self, slots: Slots, total: torch.Tensor, skip: int | None = None) -> None:
        constants, ranks = _constants(slots), len(slots.data)
        _add_up[_grid(slots, constants, 1)](
            total,
            *_arguments(slots),
            ranks if skip is None else skip,
            ranks,
            **constants,
            **LAUNCH_OPTIONS,
        )


def block_constants(fmt: Format) -> dict[str, Any]:
    """Return the constants that divide a part into programs, blocks into halves and into runs."""
    half = triton.next_power_of_2(fmt.block_elements // 2)
    rows = max(1, PROGRAM_ELEMENTS // (2 * half))
    run = fmt.rotation_elements
    return {
        "block": fmt.block_elements,
        "half": half,
        "rows": rows,
        "bits": fmt.bits,
        "run": run,
        "run_factor": fmt.rotation_factor if run else 1.0,
    }


def residual_constants(residual: Residual | None) -> dict[str, Any]:
    """Return the constants of a residual, of which a kernel for other messages has none."""
    if residual is None:
        return {"residual_bits": 0, "old_weight": 0.0, "new_weight": 1.0}
    old, new = residual.weights
    bits = 8 * residual.values.element_size()
    return {"residual_bits": bits, "old_weight": old, "new_weight": new}


def _constants(slots: Slots) -> dict[str, Any]:
    types = {"scale_type": _TYPES[slots.scale_dtype], "small_type": _TYPES[slots.small_dtype]}
    return {**block_constants(slots.fmt), **types}


def _arguments(slots: Slots) -> tuple[torch.Tensor, int, int, int]:
    border = slots.border if slots.fmt.is_quantised else 0
    return slots.data, slots.data.stride(0), slots.elements, border


def _grid(slots: Slots, constants: dict[str, Any], parts: int) -> tuple[int, int]:
    return triton.cdiv(slots.elements, constants["rows"] * constants["block"]), parts


@triton.jit
def _load_values(values, base, mask, difference: tl.constexpr):
    """Return what is quantised, before the residual is added: values, or their differences."""
    x = tl.load(values, mask, 0.0).to(tl.float32)
    if difference:
        x -= tl.load(base, mask, 0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["skip", "seed"])
def _quantise(
    values, base, residual, residual_scales, slots, slot_bytes, elements, border, skip, seed,
    block: tl.constexpr, half: tl.constexpr, rows: tl.constexpr, bits: tl.constexpr,
    run: tl.constexpr, run_factor: tl.constexpr, scale_type: tl.constexpr, small_type: tl.constexpr,
    largest: tl.constexpr, inverse: tl.constexpr, stochastic: tl.constexpr,
    difference: tl.constexpr, residual_bits: tl.constexpr, old_weight: tl.constexpr,
    new_weight: tl.constexpr,
):  # fmt: skip
    """Quantise blocks of part `program_id(1)`.

    `difference`: `base` is subtracted; `residual_bits`: 8 or 16 if `residual` is read and written,
    else 0.
    """
    part = tl.program_id(1).to(tl.int64)  # part * elements can exceed 32 bits
    if part == skip:
        return
    quantised, scales, small, packed = locate_part(
        slots, slot_bytes, elements, border, part, scale_type, small_type, block
    )
    values += part * elements
    base += part * elements
    residual += part * elements
    residual_scales += part * tl.cdiv(elements, block)
    row, first, second, exists = locate_blocks(block, half, rows)
    copy_small(values, small, first, second, exists, quantised, elements, rows * block)
    in_low, in_high = exists & (first < quantised), exists & (second < quantised)
    low = _load_values(values + first, base + first, in_low, difference)
    high = _load_values(values + second, base + second, in_high, difference)
    in_row = row * block < quantised
    if residual_bits:
        old_low, old_high = load_residual(
            residual, residual_scales + row, in_row, first, second, in_low, in_high, residual_bits
        )  # fmt: skip
        low += old_low
        high += old_high
    x_low, x_high = scale_and_rotate(
        low, high, first, second, quantised, run_factor, 1.0, block, run
    )
    largest_bits = tl.max(tl.maximum(magnitude(x_low), magnitude(x_high)), 1)
    scale, usable = scales_of(largest_bits, inverse, scale_type)
    tl.store(scales + row, scale.to(scale_type), in_row)
    scale, usable = scale[:, None], usable[:, None]
    # the seed of this part: `skip` was not counted
    written_before = (part - (part > skip)).to(tl.uint32)
    part_seed = seed.to(tl.uint32, bitcast=True) + written_before * _STRIDE
    q_low = round_to_integers(x_low, scale, usable, first, part_seed, largest, stochastic)
    q_high = round_to_integers(x_high, scale, usable, second, part_seed, largest, stochastic)
    halves_before = row[:, None] * (block // 2)
    store_integers(packed, q_low, q_high, first, second, in_low, in_high, halves_before, bits)
    if residual_bits:
        x_low, x_high = scale_and_rotate(
            q_low.to(tl.float32), q_high.to(tl.float32), first, second, quantised,
            scale * run_factor, scale, block, run,
        )  # fmt: skip
        store_residual(
            residual, residual_scales + row, in_row, first, second, in_low, in_high, residual_bits,
            next_residual(low, x_low, old_low, old_weight, new_weight),
            next_residual(high, x_high, old_high, old_weight, new_weight),
        )  # fmt: skip


@triton.jit
def _read_blocks(
    slots, slot_bytes, elements, border, part,
    block: tl.constexpr, half: tl.constexpr, rows: tl.constexpr, bits: tl.constexpr,
    run: tl.constexpr, run_factor: tl.constexpr, scale_type: tl.constexpr,
    small_type: tl.constexpr,
):  # fmt: skip
    """Return the values of both halves of this program's blocks of a part, [rows, half] fp32.

    Runs are rotated back, unless `run` is 0.
    """
    quantised, scales, small, packed = locate_part(
        slots, slot_bytes, elements, border, part, scale_type, small_type, block
    )
    row, first, second, exists = locate_blocks(block, half, rows)
    in_low, in_high = exists & (first < quantised), exists & (second < quantised)
    scale = tl.load(scales + row, row * block < quantised, 0.0).to(tl.float32)[:, None]
    if bits == 8:
        q_low = tl.load(packed + first, in_low, 0).to(tl.int32)
        q_high = tl.load(packed + second, in_high, 0).to(tl.int32)
    else:
        both = tl.load(packed + (first - row[:, None] * (block // 2)), in_low, 0).to(tl.int32)
        q_low = (both << 28) >> 28  # a shift of a signed number keeps the sign
        q_high = both >> 4
    low, high = scale_and_rotate(
        q_low.to(tl.float32), q_high.to(tl.float32), first, second, quantised,
        scale * run_factor, scale, block, run,
    )  # fmt: skip
    if (tl.program_id(0) + 1) * rows * block > quantised:
        is_small = exists & (first >= quantised) & (first < elements)
        low = tl.where(
            is_small, tl.load(small + (first - quantised), is_small, 0.0).to(tl.float32), low
        )
        is_small = exists & (second >= quantised) & (second < elements)
        high = tl.where(
            is_small, tl.load(small + (second - quantised), is_small, 0.0).to(tl.float32), high
        )
    return low, high


@triton.jit
def _dequantise(
    out, slots, slot_bytes, elements, border,
    block: tl.constexpr, half: tl.constexpr, rows: tl.constexpr, bits: tl.constexpr,
    run: tl.constexpr, run_factor: tl.constexpr, scale_type: tl.constexpr,
    small_type: tl.constexpr, add: tl.constexpr,
):  # fmt: skip
    """Dequantise blocks of part `program_id(1)`; `add`: to the old values that are quantised."""
    part = tl.program_id(1).to(tl.int64)
    low, high = _read_blocks(
        slots, slot_bytes, elements, border, part, block, half, rows, bits, run, run_factor,
        scale_type, small_type,
    )  # fmt: skip
    out += part * elements
    _, first, second, exists = locate_blocks(block, half, rows)
    if add:
        quantised = tl.minimum(border - part * elements, elements)
        in_low, in_high = exists & (first < quantised), exists & (second < quantised)
        low = tl.where(in_low, tl.load(out + first, in_low, 0.0).to(tl.float32) + low, low)
        high = tl.where(in_high, tl.load(out + second, in_high, 0.0).to(tl.float32) + high, high)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + first, cast(low, dtype), exists & (first < elements))
    tl.store(out + second, cast(high, dtype), exists & (second < elements))


@triton.jit(do_not_specialize=["skip", "ranks"])
def _add_up(
    total, slots, slot_bytes, elements, border, skip, ranks,
    block: tl.constexpr, half: tl.constexpr, rows: tl.constexpr, bits: tl.constexpr,
    run: tl.constexpr, run_factor: tl.constexpr, scale_type: tl.constexpr,
    small_type: tl.constexpr,
):  # fmt: skip
    """Add blocks of part 0, which is in every slot, of all slots but `skip` to the total."""
    part = tl.program_id(1).to(tl.int64)
    _, first, second, exists = locate_blocks(block, half, rows)
    in_low, in_high = exists & (first < elements), exists & (second < elements)
    # values of rotated blocks are summed from 0, and added to the total when rotated back
    rotated = tl.minimum(border, elements) if run else 0
    low = tl.load(total + first, in_low & (first >= rotated), 0.0)
    high = tl.load(total + second, in_high & (second >= rotated), 0.0)
    for rank in range(ranks):
        if rank != skip:
            rank_low, rank_high = _read_blocks(
                slots, slot_bytes, elements, border, part, block, half, rows, bits, 0, 1.0,
                scale_type, small_type,
            )  # fmt: skip
            low += rank_low
            high += rank_high
        slots += slot_bytes  # advance the pointer: rank * slot_bytes could exceed 32 bits
    if run:
        low, high = scale_and_rotate(
            low, high, first, second, rotated, run_factor, 1.0, block, run
        )  # fmt: skip
        in_first, in_second = exists & (first < rotated), exists & (second < rotated)
        low = tl.where(in_first, tl.load(total + first, in_first, 0.0) + low, low)
        high = tl.where(in_second, tl.load(total + second, in_second, 0.0) + high, high)
    tl.store(total + first, low, in_low)
    tl.store(total + second, high, in_high)
