"""A gradient on its way from a backward pass to the buffer in which gradients are added up."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from frontier_llm.collectives.handles import Handle
from frontier_llm.sharding.unit_gradients import UnitGradients

Gather = Callable[[torch.Tensor], tuple[torch.Tensor, Handle]]
"""Starts to gather a tensor whose parts are on several ranks; returns the whole tensor, and what to
wait for."""


@dataclass(eq=False)
class Contribution:
    """What one backward pass adds to the gradient of one parameter."""

    unit: UnitGradients
    """The gradients of its unit."""
    index: int
    """Index of the parameter in the unit."""
    operands: tuple[torch.Tensor, ...]
    """The gradient in the shape of the parameter; or the two factors of the gradient of a weight
    [out, in]: the gradient of the outputs [tokens, out] and the inputs [tokens, in]."""
    gather: Gather | None = None
    """Gathers the inputs from the tensor-parallel ranks, of which each has some of the tokens."""
    gathered: tuple[torch.Tensor, Handle] | None = None
    """What `gather` has returned."""

    def detached(self) -> "Contribution":
        """Return a copy that does not keep the graph of the forward pass in memory."""
        return replace(self, operands=tuple(operand.detach() for operand in self.operands))

    def start_gather(self) -> None:
        """Start to gather the inputs, if they must be gathered."""
        if self.gather is not None:
            self.gathered = self.gather(self.operands[-1])

    def add(self) -> None:
        """Compute the gradient and add it to the buffer."""
        if len(self.operands) == 1:
            self.unit.add(self.index, self.operands[0])
            return
        grad_outputs, inputs = self.operands
        if self.gathered is not None:
            inputs, handle = self.gathered
            handle.wait()
        self.unit.add_product(self.index, grad_outputs, inputs)
