"""Formats: how elements travel, and the bytes of all that travels with them.

A float format is two or four bytes an element. A quantised one sends *slots*: messages of equal
size, each with one part of a buffer. Of a part of m elements of which the first q are quantised a
slot holds

    scales   one for each block of `block_elements` that begins in the q
    small    the other m - q elements, two bytes each
    values   q values of 8 bits, or of 4 bits, two in a byte

each padded to a multiple of 4 bytes. Small are the norms and biases of a unit: its flat buffer ends
with them (flat_layout: what is not decayed comes last), so a buffer is quantised up to a *border*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.config.collectives import CollectivesConfig, FormatName

BITS: dict[FormatName, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
SMALL_BYTES = 2
ALIGNMENT_BYTES = 4


class Slot(NamedTuple):
    """Where the three pieces of a message lie, in bytes."""

    small: int
    """First byte of the small elements; scales are before it."""
    values: int
    """First byte of the values."""
    stop: int
    """The byte after the last."""


@dataclass(frozen=True)
class Format:
    """How elements travel."""

    name: FormatName
    block_elements: int = 256
    """Elements that share a scale."""
    scale_bytes: int = 4
    """4 = fp32, 2 = bf16."""
    is_stochastic: bool = False
    """Whether values are rounded up or down at random, so that they are right on average."""

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return BITS[self.name]

    @property
    def is_quantised(self) -> bool:
        """Whether values are integers with scales."""
        return self.bits <= 8

    @property
    def largest(self) -> int:
        """The largest integer: 127 or 7; the most negative is its mirror."""
        return (1 << (self.bits - 1)) - 1

    @property
    def element_bytes(self) -> float:
        """Bytes of an element of a long buffer, scales included."""
        scales = self.scale_bytes / self.block_elements if self.is_quantised else 0.0
        return self.bits / 8 + scales

    def is_lossless(self, element_bytes: int) -> bool:
        """Whether elements of so many bytes travel as they are: nothing is made wider."""
        return self.bits >= 8 * element_bytes

    def quantised_of(self, border: int, start: int, elements: int) -> int:
        """Return how many elements of a part are quantised.

        Args:
            border: of the buffer: elements before it are quantised.
            start: of the part in the buffer.
            elements: of the part.
        """
        return max(0, min(border - start, elements)) if self.is_quantised else 0

    def slot(self, elements: int, quantised: int) -> Slot:
        """Lay out the message of a part of `elements`, of which `quantised` are so."""
        blocks = -(-quantised // self.block_elements)
        small = _aligned(blocks * self.scale_bytes)
        values = small + _aligned((elements - quantised) * SMALL_BYTES)
        return Slot(small, values, values + _aligned(self._value_bytes(quantised)))

    def slot_bytes(self, elements: int, parts: int, border: int) -> int:
        """Return the size of the messages that carry `parts` parts of `elements` each.

        All are as long as the longest, so that any backend can send them: three kinds of parts
        are the candidates, before, at and behind the border.
        """
        at_border = min(border // elements, parts - 1) if elements else 0
        counts = {
            self.quantised_of(border, part * elements, elements)
            for part in (0, at_border, parts - 1)
        }
        return max(self.slot(elements, quantised).stop for quantised in counts)

    def _value_bytes(self, quantised: int) -> int:
        """Count whole blocks, then the last one; a block is a whole number of bytes."""
        full, rest = divmod(quantised, self.block_elements)
        return full * (self.block_elements * self.bits // 8) + -(-rest * self.bits // 8)


FP32, BF16 = Format("fp32"), Format("bf16")


@dataclass(frozen=True)
class StateFormats:
    """The format of each collective of the model states, in one step."""

    params: Format = FP32
    """Gathers before a forward pass."""
    params_backward: Format = FP32
    """Gathers before a backward pass."""
    refresh: Format = FP32
    """The gather of what was updated."""
    grads: Format = FP32
    """Scatters between ranks of one node."""
    grads_across: Format = FP32
    """Scatters between ranks of several nodes."""

    @classmethod
    def at(cls, config: CollectivesConfig, step: int = 1) -> "StateFormats":
        """Return the formats of a step, counted from 1.

        After `until_step` integers are replaced by fp32, which for parameters means: as they are.
        """
        is_over = config.until_step is not None and step > config.until_step

        def made(name: FormatName) -> Format:
            plain = is_over and BITS[name] <= 8
            return Format(
                "fp32" if plain else name,
                config.block_elements,
                4 if config.scales_format == "fp32" else 2,
                config.rounding == "stochastic",
            )

        return cls(
            params=made(config.params_format),
            params_backward=made(config.params_backward_format or config.params_format),
            refresh=made(config.refresh_format),
            grads=made(config.grads_format),
            grads_across=made(config.grads_across_format or config.grads_format),
        )

    def encode(self, compute_bytes: int) -> bool:
        """Whether anything is sent in slots, by a model that computes in so many bytes."""
        gathered = (self.params, self.params_backward, self.refresh)
        return any(not one.is_lossless(compute_bytes) for one in gathered) or any(
            one.is_quantised for one in (self.grads, self.grads_across)
        )

    def grads_over(self, nodes: Sequence[int]) -> Format:
        """Return the format of a scatter over ranks that run on these nodes."""
        return self.grads if len(set(nodes)) == 1 else self.grads_across


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
