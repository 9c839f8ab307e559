"""Error feedback: what rounding lost of a gradient is added to the next one that is sent.

Kept on the rank that sends, for the hops between nodes, whose formats are the narrow ones; an
element costs two bytes. Sums over steps then lose nothing but the last rounding.

Source: Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), for a reduce-scatter.
"""

import torch

from frontier_llm.collectives.blockwise import RESIDUAL_DTYPE
from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.partition import Digit
from frontier_llm.sharding.groups import StateGroups
from frontier_llm.sharding.unit import Unit


class Feedback:
    """The rounding errors of one unit's gradients, a hop each."""

    def __init__(
        self, unit: Unit, groups: StateGroups, transport: Transport, enabled: bool
    ) -> None:
        sent = {
            "a": (groups.a, unit.layout.size),
            "b": (groups.b, unit.params.length),
            "c": (groups.c, unit.grads.length),
        }
        is_cut = groups.factors.grads > 1
        self._errors: dict[str, torch.Tensor] = {
            digit: torch.zeros(elements, dtype=RESIDUAL_DTYPE, device=unit.whole.device)
            for digit, (group, elements) in sent.items()
            if enabled
            and group is not None
            and (is_cut or digit == "c")
            and transport.keeps_errors(group)
        }

    def of(self, digit: Digit) -> torch.Tensor | None:
        """Return [elements sent] bf16, the errors of the hop along a digit; None = not kept."""
        return self._errors.get(digit)

    def forget(self) -> None:
        """Begin anew: what is kept is of gradients that were thrown away."""
        for error in self._errors.values():
            error.zero_()

    def memory_bytes(self) -> int:
        """Return the bytes that stay allocated."""
        return sum(error.numel() * error.element_size() for error in self._errors.values())
