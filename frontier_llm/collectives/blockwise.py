"""Block quantisation: what it computes, and the interface of its implementations.

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

With `rotation_elements` = R, a block is divided into runs of R values, and each run is multiplied
by H / sqrt(R) before the scale is computed, where H is the Walsh-Hadamard matrix of order R. The
values after the last full run of a shorter block are left as they are. Let c be 1 / sqrt(R) in
fp32. The product with H is a fast transform: for the strides 1, 2, 4, ... up to R / 2 in this
order, each pair of values (a, b) that lie a stride apart becomes (a + b, a - b).

    quantise    the transform of x, then a product by c, replaces x above.
    dequantise  the transform of q, which is exact, since |sums| <= Q R < 2**24; then a product by
                s c, rounded to fp32. Values outside full runs are q s.
    add up      q s is summed over the messages in their order, starting from 0; then the transform
                of the sums, a product by c, and one addition to the total. The transform is linear,
                so it is needed once per block and not once per message.

The rotation is orthogonal, so the Euclidean norm of a block's error is that of the error of the
rotated block: at most s sqrt(n) / 2 for n values (< s sqrt(n) if stochastic), apart from the
rounding of the transform in fp32. The rotation distributes an outlier over its run: if one value of
a block is much larger than the others and R is the block, m and s become smaller by sqrt(R). For
any block, m grows at most by sqrt(R). A value that is not finite makes its run not finite, and
hence its block. So do finite values whose sums exceed fp32.

A message can carry differences. With a `base`, x is the value to be sent less the base, both in
fp32, and `dequantise` adds the decoded difference to what a receiver holds. If every receiver holds
the base, including the rank that sends, then all of them hold the same bits afterwards. The next
difference contains the error of this one, so that errors do not add up.

Every operation is rounded once to fp32 (a product by 1/Q or c, a sum, a division, a product, a
rounding to an integer), so that C and Triton can reproduce it.

Sources: symmetric blocks as in ZeRO++ (arXiv:2306.10209); the rounding of scales differs. The
rotation before quantisation as in SDP4Bit (arXiv:2410.15526), where it is used for gradients in 4
bits, as are the differences of weights.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from typing_extensions import override

from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import Blocks, Slots

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
        residual: Residual | None = None,
        seed: int = 0,
        skip: int | None = None,
        base: torch.Tensor | None = None,
    ) -> None:
        """Write each part of a buffer into its slot.

        Args:
            parts: [parts, m] fp32, bf16 or fp16, contiguous, read only.
            residual: rounding errors of [parts, m]. The residual of an element that is quantised is
                added to it first, in fp32, then overwritten with the next one (residual.py).
            seed: 32-bit seed of stochastic rounding of the first part that is written. From each
                written part to the next it grows by PART_SEED_STRIDE, modulo 2**32.
            skip: index of a part that is not written.
            base: [parts, m] fp32, bf16 or fp16, contiguous, read only. It is subtracted from
                elements that are quantised, in fp32, before the residual is added. The other
                elements are written as they are.
        """

    @abstractmethod
    def dequantise(self, slots: Slots, parts: torch.Tensor, *, add: bool = False) -> None:
        """Read each part of a buffer from its slot, as written by `quantise`.

        The parts, [parts, m] fp32, bf16 or fp16, contiguous, are overwritten. With `add`, elements
        that are quantised are added to the old values, in fp32, and rounded once to their dtype.
        """

    @abstractmethod
    def add_up(self, slots: Slots, total: torch.Tensor, skip: int | None = None) -> None:
        """Add the parts in slots to a total, [m] fp32, in the order of the slots.

        Every slot contains part 0 of the table, from another rank; the slot `skip` is not added.
        """


class PartKernels(BlockKernels):
    """Kernels that process one part per call, as on a CPU, where a call costs little."""

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
        if residual is not None:
            residual.assert_fits(parts, slots.fmt.block_elements)
        for i in range(len(parts)):
            if i == skip:
                continue
            quantised, small, blocks = slots.sections(i)
            if quantised < slots.elements:
                small.copy_(parts[i, quantised:])
            if quantised:
                errors = None
                if residual is not None:
                    errors = residual.start_of(i, quantised, slots.fmt.block_elements)
                start = None if base is None else base[i, :quantised]
                self.quantise_part(parts[i, :quantised], blocks, errors, seed, start)
            seed = (seed + PART_SEED_STRIDE) & _UINT32_MASK

    @override
    def dequantise(self, slots: Slots, parts: torch.Tensor, *, add: bool = False) -> None:
        for i, out in enumerate(parts):
            quantised, small, blocks = slots.sections(i)
            if quantised < slots.elements:
                out[quantised:].copy_(small)
            if quantised:
                self.dequantise_part(blocks, out[:quantised], add=add)

    @override
    def add_up(self, slots: Slots, total: torch.Tensor, skip: int | None = None) -> None:
        quantised, small, blocks = slots.sections(0, all_rows=True)
        for i, unquantised in enumerate(small if quantised < slots.elements else ()):
            if i != skip:
                total[quantised:].add_(unquantised)
        if quantised:
            self.add_up_parts(blocks, total[:quantised], skip)

    @abstractmethod
    def quantise_part(
        self,
        values: torch.Tensor,
        blocks: Blocks,
        residual: Residual | None,
        seed: int,
        base: torch.Tensor | None,
    ) -> None:
        """Quantise the first elements of a part, `values` [n], n at least 1; see `quantise`.

        The others are `base` [n], and `residual` with values [n] and scales [blocks].
        """

    @abstractmethod
    def dequantise_part(self, blocks: Blocks, out: torch.Tensor, *, add: bool) -> None:
        """Dequantise into `out`, [n], or add to it."""

    @abstractmethod
    def add_up_parts(self, blocks: Blocks, total: torch.Tensor, skip: int | None) -> None:
        """Dequantise rows of blocks, and add them to `total`, [n] fp32."""
