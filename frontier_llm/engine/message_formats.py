"""The number formats in which states are sent."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from frontier_llm.geometry.formats import Feedback, Format, LevelFormats, StateFormats

Name = Literal["fp32", "bf16", "int8", "int4"]


@dataclass(frozen=True)
class Formats:
    """The number formats of gathered parameters, updated parameters, gradients and their sums.

    Parameters are never sent in more bits than they have. Integers have one scale per block.
    """

    params: Name = "fp32"
    """Of parameters that are gathered for a forward or backward pass."""
    refresh: Name = "fp32"
    """Of updated parameters, which are sent once per step."""
    grads: Name = "fp32"
    """Of gradients that are sent inside a node."""
    grads_across: Name | None = None
    """Of gradients that are sent between nodes; None = `grads`."""
    sums: Name = "fp32"
    """Of gradients that are summed over replicas."""
    block_elements: int = 256
    """Elements that share a scale."""
    keep_errors: bool = False
    """Whether the rounding error of a gradient that is sent between nodes is added to the next
    one."""

    PLAIN: ClassVar["Formats"]
    """No compression."""
    BF16: ClassVar["Formats"]
    """Gradients and their sums in bf16."""
    ZEROPP: ClassVar["Formats"]
    """Parameters in int8, gradients in int8 inside a node and in int4 between nodes (ZeRO++,
    arXiv:2306.10209)."""

    def at_each_step(self) -> StateFormats:
        """Return the formats of all collectives, which are those of every step."""

        def make(name: Name) -> Format:
            return Format(name, self.block_elements, 2)

        grads, across = make(self.grads), make(self.grads_across or self.grads)
        sums = make(self.sums)
        return StateFormats(
            params=make(self.params),
            params_backward=make(self.params),
            refresh=make(self.refresh),
            grads=LevelFormats(grads, grads, across),
            sums=LevelFormats(sums, sums, sums),
        )

    def feedback(self) -> Feedback | None:
        """Return how rounding errors are kept; None = they are not."""
        return Feedback() if self.keep_errors else None


Formats.PLAIN = Formats()
Formats.BF16 = Formats(grads="bf16", sums="bf16")
Formats.ZEROPP = Formats(params="int8", refresh="int8", grads="int8", grads_across="int4")
