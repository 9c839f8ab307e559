"""Number formats of messages, and their sizes in bytes including scales and padding.

A float format takes two or four bytes per element. A quantised format sends *slots*: messages of
equal size, each with one part of a buffer. The slot for a part of m elements, the first q of them
quantised, holds

    scales   one per block of `block_elements` that begins within the first q elements
    small    the other m - q elements, two bytes each
    values   q values of 8 bits, or of 4 bits, two per byte

each padded to a multiple of 4 bytes. The small elements are a unit's norms and biases. They lie at
the end of its flat buffer (flat_layout.py), so a buffer is quantised up to a *border*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.config.collectives import CollectivesConfig, FormatName

BITS: dict[FormatName, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
SMALL_BYTES = 2
ALIGNMENT_BYTES = 4


class Slot(NamedTuple):
    """Byte offsets of the three parts of a message."""

    small: int
    """First byte of the small elements, which follow the scales."""
    values: int
    """First byte of the values."""
    stop: int
    """The byte after the last."""


@dataclass(frozen=True)
class Format:
    """The number format of a message."""

    name: FormatName
    block_elements: int = 256
    """Elements that share a scale."""
    scale_bytes: int = 4
    """4 = fp32, 2 = bf16."""
    is_stochastic: bool = False
    """Whether values are rounded up or down at random, so that they are right on average."""

    @property
    def bits(self) -> int:
        """Bits per value."""
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
        """Bytes per element of a long buffer, including scales."""
        scales = self.scale_bytes / self.block_elements if self.is_quantised else 0.0
        return self.bits / 8 + scales

    def is_lossless(self, element_bytes: int) -> bool:
        """Whether elements of this many bytes are sent unchanged; a wider format widens nothing."""
        return self.bits >= 8 * element_bytes

    def quantised_of(self, border: int, start: int, elements: int) -> int:
        """Return how many elements of a part of a buffer are quantised.

        Args:
            border: number of elements at the start of the buffer that are quantised.
            start: first element of the part.
            elements: number of elements of the part.
        """
        return max(0, min(border - start, elements)) if self.is_quantised else 0

    def slot(self, elements: int, quantised: int) -> Slot:
        """Return the layout of a message of `elements`, the first `quantised` of them quantised."""
        blocks = -(-quantised // self.block_elements)
        small = _aligned(blocks * self.scale_bytes)
        values = small + _aligned((elements - quantised) * SMALL_BYTES)
        return Slot(small, values, values + _aligned(self._value_bytes(quantised)))

    def slot_bytes(self, elements: int, parts: int, border: int) -> int:
        """Return the size of each of the messages with the `parts` parts of a buffer.

        All are as long as the longest, so that any backend can send them. The longest is the first
        part, the last part, or the part that contains the border.

        Args:
            elements: of one part.
            parts: number of parts.
            border: number of elements at the start of the buffer that are quantised.
        """
        at_border = min(border // elements, parts - 1) if elements else 0
        counts = {
            self.quantised_of(border, part * elements, elements)
            for part in (0, at_border, parts - 1)
        }
        return max(self.slot(elements, quantised).stop for quantised in counts)

    def _value_bytes(self, quantised: int) -> int:
        """Return the bytes of the values; each full block is a whole number of bytes."""
        full, rest = divmod(quantised, self.block_elements)
        return full * (self.block_elements * self.bits // 8) + -(-rest * self.bits // 8)


FP32, BF16 = Format("fp32"), Format("bf16")


@dataclass(frozen=True)
class StateFormats:
    """The format of each collective of the model states in one step."""

    params: Format = FP32
    """Of parameters gathered before a forward pass."""
    params_backward: Format = FP32
    """Of parameters gathered before a backward pass."""
    refresh: Format = FP32
    """Of updated parameters, gathered once per step."""
    grads: Format = FP32
    """Of gradients scattered between ranks of one node."""
    grads_across: Format = FP32
    """Of gradients scattered between ranks of several nodes."""

    @classmethod
    def at(cls, config: CollectivesConfig, step: int = 1) -> "StateFormats":
        """Return the formats of a step, counted from 1.

        After `until_step` integers are replaced by fp32; parameters are then sent unchanged.
        """
        is_over = config.until_step is not None and step > config.until_step

        def make(name: FormatName) -> Format:
            plain = is_over and BITS[name] <= 8
            return Format(
                "fp32" if plain else name,
                config.block_elements,
                4 if config.scales_format == "fp32" else 2,
                config.rounding == "stochastic",
            )

        return cls(
            params=make(config.params_format),
            params_backward=make(config.params_backward_format or config.params_format),
            refresh=make(config.refresh_format),
            grads=make(config.grads_format),
            grads_across=make(config.grads_across_format or config.grads_format),
        )

    def encode(self, compute_bytes: int) -> bool:
        """Whether any message is encoded in slots if the model computes in this many bytes."""
        gathered = (self.params, self.params_backward, self.refresh)
        return any(not one.is_lossless(compute_bytes) for one in gathered) or any(
            one.is_quantised for one in (self.grads, self.grads_across)
        )

    def grads_over(self, nodes: Sequence[int]) -> Format:
        """Return the format of a scatter of gradients over ranks that run on these nodes."""
        return self.grads if len(set(nodes)) == 1 else self.grads_across


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
