"""Number formats of messages, and their sizes in bytes including scales and padding.

A float format takes two or four bytes per element. A quantised format divides a buffer into equal
parts and sends each part in a *slot*, a message of fixed size. A part has m elements, of which the
first q are quantised. Its slot consists of three sections, each padded to a multiple of 16 bytes:

    scales   one scale per block of `block_elements` quantised elements
    small    the other m - q elements, two bytes each
    values   the q quantised values: one byte each in 8 bits, two per byte in 4 bits

The small elements are the norms and biases of a unit, which are never quantised. They are at the
end of the flat buffer of the unit (flat_layout.py). The elements before the *border* are quantised.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.config.collectives import CollectivesConfig, FormatName
from frontier_llm.geometry.grid import LEVELS, Level

BITS: dict[FormatName, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Bits per value, without scales."""
SMALL_BYTES = 2
"""Bytes per element of norms and biases in a quantised message."""
SMALLEST_ROTATION = 16
"""The fewest elements that are rotated together."""
ALIGNMENT_BYTES = 16
"""Each section of a slot is padded to a multiple of this many bytes: one load of a GPU's thread."""


class Slot(NamedTuple):
    """Byte offsets of the sections of a slot, whose scales begin at offset 0."""

    small: int
    values: int
    stop: int
    """Size of the slot in bytes."""


@dataclass(frozen=True)
class Format:
    """The number format of a message."""

    name: FormatName
    block_elements: int = 256
    """Elements that share a scale."""
    scale_bytes: int = 4
    """Bytes per scale: 4 for fp32, 2 for bf16."""
    is_stochastic: bool = False
    """Whether values are rounded up or down at random, which is exact on average."""
    rotation_elements: int = 0
    """Elements per run of a block that is rotated before it is rounded (collectives/blockwise.py):
    a power of two, at least SMALLEST_ROTATION; 0 = none. A block has one run or an even number of
    runs, since kernels process the two halves of a block."""

    def __post_init__(self) -> None:
        run = self.rotation_elements
        if run:
            assert run >= SMALLEST_ROTATION
            assert run & (run - 1) == 0
            assert self.block_elements == run or self.block_elements % (2 * run) == 0

    @property
    def rotation_factor(self) -> float:
        """The factor that makes the Walsh-Hadamard matrix of a run orthogonal."""
        return 1 / math.sqrt(self.rotation_elements)

    @property
    def bits(self) -> int:
        """Bits per value."""
        return BITS[self.name]

    @property
    def is_quantised(self) -> bool:
        """Whether values are sent as integers with scales."""
        return self.bits <= 8

    @property
    def largest(self) -> int:
        """The largest integer: 127 for 8 bits, 7 for 4 bits. The smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    @property
    def element_bytes(self) -> float:
        """Bytes per element of a long buffer, including scales."""
        scales = self.scale_bytes / self.block_elements if self.is_quantised else 0.0
        return self.bits / 8 + scales

    def is_lossless(self, element_bytes: int) -> bool:
        """Whether elements of so many bytes are sent unchanged; no format widens them."""
        return self.bits >= 8 * element_bytes

    def quantised_of(self, border: int, start: int, elements: int) -> int:
        """Return how many of the elements from `start` on are quantised: those before a border."""
        return max(0, min(border - start, elements)) if self.is_quantised else 0

    def slot(self, elements: int, quantised: int) -> Slot:
        """Return the slot of a part of `elements`, the first `quantised` of them quantised."""
        blocks = -(-quantised // self.block_elements)
        small = _aligned(blocks * self.scale_bytes)
        values = small + _aligned((elements - quantised) * SMALL_BYTES)
        return Slot(small, values, values + _aligned(self._value_bytes(quantised)))

    def slot_bytes(self, elements: int, parts: int, border: int) -> int:
        """Return the bytes of a slot, which is the same for all parts of a buffer.

        Every slot has the size that the largest part needs, so that any backend can send the
        slots. The largest is the first part, the last part, or the part that contains the border:
        the number of elements at the start of the buffer that are quantised. `elements` is the
        number of elements of one part.
        """
        border_part = min(border // elements, parts - 1) if elements else 0
        quantised_counts = {
            self.quantised_of(border, part * elements, elements)
            for part in (0, border_part, parts - 1)
        }
        return max(self.slot(elements, quantised).stop for quantised in quantised_counts)

    def _value_bytes(self, quantised: int) -> int:
        """With 4 bits, a byte holds a value of each half of a block, also of a shorter last one."""
        full_blocks, rest = divmod(quantised, self.block_elements)
        block_bytes = self.block_elements * self.bits // 8
        return full_blocks * block_bytes + min(rest, block_bytes)


FP32, BF16 = Format("fp32"), Format("bf16")


class LevelFormats(NamedTuple):
    """The format of messages by the farthest level of links that a group of ranks crosses."""

    package: Format = FP32
    node: Format = FP32
    network: Format = FP32

    def at(self, level: Level) -> Format:
        """Return the format of a level."""
        return self[LEVELS.index(level)]

    @property
    def widest(self) -> Format:
        """The format with the most bits."""
        return max(self, key=lambda message_format: message_format.bits)


FP32_AT_ALL_LEVELS = LevelFormats()


@dataclass(frozen=True)
class StateFormats:
    """The message formats of all collectives of the model states in one step."""

    params: Format = FP32
    params_backward: Format = FP32
    """Format of parameters that are gathered for a backward pass."""
    refresh: Format = FP32
    """Format of updated parameters that are gathered once per step."""
    grads: LevelFormats = FP32_AT_ALL_LEVELS
    """Formats of gradients in reduce-scatters."""
    sums: LevelFormats = FP32_AT_ALL_LEVELS
    """Formats of gradients that are summed over replicas."""
    refresh_differences: bool = False
    """Whether the refresh sends differences to what was last sent, which receivers add."""

    @classmethod
    def at(cls, config: CollectivesConfig, step: int = 1) -> "StateFormats":
        """Return the formats of a step, counted from 1.

        After the step `until_step`, fp32 replaces integer formats, and parameters are sent
        unchanged. In every `refresh_full_every`-th step, a refresh by differences sends the
        parameters themselves.
        """
        is_over = config.until_step is not None and step > config.until_step
        sends_differences = config.refresh_differences and not is_over
        is_full = sends_differences and step % config.refresh_full_every == 0

        def make(name: FormatName, *, rotated: bool = False) -> Format:
            is_replaced = is_over and BITS[name] <= 8
            return Format(
                "fp32" if is_replaced else name,
                config.block_elements,
                {"fp32": 4, "bf16": 2}[config.scales_format],
                {"nearest": False, "stochastic": True}[config.rounding],
                config.rotation_elements if rotated and name == "int4" else 0,
            )

        return cls(
            params=make(config.params_format),
            params_backward=make(config.params_backward_format or config.params_format),
            refresh=FP32 if is_full else make(config.refresh_format),
            grads=LevelFormats(*(make(name, rotated=True) for name in config.grads_formats)),
            sums=LevelFormats(*(make(name, rotated=True) for name in config.sums_formats)),
            refresh_differences=sends_differences and not is_full,
        )

    def any_encoded(self, compute_bytes: int) -> bool:
        """Whether any message is encoded if parameters have `compute_bytes` bytes per element.

        Parameters are encoded if they are sent in fewer bits than they have, gradients in
        reduce-scatters if they are sent as integers (in bf16 they are only cast), and sums over
        replicas if they are not sent in fp32.
        """
        gathered = (self.params, self.params_backward, self.refresh)
        return (
            any(not params.is_lossless(compute_bytes) for params in gathered)
            or any(grads.is_quantised for grads in self.grads)
            or self.encodes_sums
        )

    @property
    def is_quantised(self) -> bool:
        """Whether any collective sends integers."""
        gathered = (self.params, self.params_backward, self.refresh)
        return any(sent.is_quantised for sent in (*gathered, *self.grads, *self.sums))

    @property
    def encodes_sums(self) -> bool:
        """Whether sums over replicas are sent in parts, in fewer bits than fp32."""
        return any(not sums.is_lossless(FP32.bits // 8) for sums in self.sums)

    @property
    def exchanges(self) -> bool:
        """Whether any gradients are sent directly to the ranks that sum them, and not in rings."""
        return any(format_.bits < FP32.bits for format_ in (*self.grads, *self.sums))


@dataclass(frozen=True)
class Feedback:
    """How a rank keeps the rounding errors of gradients that it sends to other nodes."""

    block_elements: int | None = None
    """Elements that share a scale, for errors in int8; None = errors in bf16."""
    decay: float = 0.0
    """Weight of the old errors in a moving average; 0 = only the last error is kept."""
    reset_every: int | None = None
    """Steps after which the errors are discarded; None = never."""

    @classmethod
    def of(cls, config: CollectivesConfig) -> "Feedback | None":
        """Return what a configuration asks for; None = no errors are kept."""
        if not config.error_feedback:
            return None
        block = {"int8": config.block_elements, "bf16": None}[config.feedback_format]
        return cls(block, config.feedback_decay, config.feedback_reset_every)

    def stored_bytes(self, parts: int, elements: int) -> int:
        """Return the bytes of the errors of `parts` parts of `elements` elements each."""
        if self.block_elements is None:
            return 2 * parts * elements
        scale_bytes = 4 * -(-elements // self.block_elements)
        return parts * (elements + scale_bytes)

    def is_reset_at(self, step: int) -> bool:
        """Whether the errors are discarded before this step, counted from 1."""
        return self.reset_every is not None and step % self.reset_every == 0


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
