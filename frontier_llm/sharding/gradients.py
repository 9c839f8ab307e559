"""Gradients: accumulated in fp32 during the backward pass, and reduced as units complete.

A unit's backward pass is complete when each of its parameters has its gradient. Then the reduction
of its gradients over ranks starts (sharding/unit_gradients.py), if there is one in this
micro-batch.

A gradient comes from autograd as a tensor, which is moved into a buffer and freed, or from the
layer that reads the weight as two factors, whose product is computed in the buffer (`ProductSink`
in protocols.py). Most gradients are such products.

Reductions run while the next unit computes. A reduction is a sequence of collectives. When a unit
completes, every reduction under way starts its next collective, so that the second collective of
one unit overlaps with the first collective of the next unit.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from frontier_llm.collectives.handles import Chain
from frontier_llm.collectives.transport import Transport
from frontier_llm.protocols import set_product_sink
from frontier_llm.sharding.unit import StateGroups, Unit
from frontier_llm.sharding.unit_gradients import UnitGradients


class Gradients:
    """The gradients of a rank's trainable units.

    Order of calls in a step: `begin_step`; backward passes, each preceded by `begin_backward`, all
    but the last inside `accumulating`; `finish`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: StateGroups,
        transport: Transport,
        units_in_flight: int,
        on_complete: Callable[[Unit], None],
        *,
        feedback: bool = False,
        fuse: bool = True,
    ) -> None:
        """Register a hook on each parameter's gradient.

        Args:
            units: the trainable units.
            groups: process groups to reduce over.
            transport: sends the gradients in its formats; sums are fp32.
            units_in_flight: maximum number of reductions under way.
            on_complete: called when a unit's backward pass is complete and its parameters are not
                needed any more.
            feedback: whether to use error feedback (sharding/unit_gradients.py).
            fuse: whether parameters get a sink, so that layers give gradients as two factors.
        """
        self._on_complete = on_complete
        self._units = [UnitGradients(unit, groups, transport, feedback) for unit in units]
        self._units_in_flight = units_in_flight
        self._under_way: deque[Chain] = deque()
        self._last_micro_batch = True
        for gradients in self._units:
            for index, record in enumerate(gradients.unit.records):
                record.parameter.register_post_accumulate_grad_hook(
                    partial(self._on_gradient, gradients, index)
                )
                if fuse:
                    set_product_sink(record.parameter, partial(self._on_product, gradients, index))

    def begin_step(self) -> None:
        """Discard the gradients of the previous step."""
        for gradients in self._units:
            gradients.begin_step()

    def begin_backward(self) -> None:
        """Close the previous backward pass, which may not have reached every parameter."""
        for gradients in self._units:
            if gradients.is_partial:
                gradients.expect_all()
                if gradients.is_sharded:
                    self._start_reduction(gradients, last_micro_batch=False)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Return a context for the backward passes that are not the last one of the step."""
        self._last_micro_batch = False
        try:
            yield
        finally:
            self._last_micro_batch = True

    def finish(self) -> None:
        """Start the remaining reductions and wait for all; then `shards` holds the final sums."""
        for gradients in self._units:
            if not gradients.is_final:
                self._start_reduction(gradients, last_micro_batch=True)
        while self._under_way:
            self._under_way.popleft().wait()

    def shards(self) -> list[torch.Tensor]:
        """Return, per unit, [n / o] fp32: the gradients of this rank's optimizer interval."""
        return [gradients.shard for gradients in self._units]

    def memory_bytes(self) -> int:
        """Return the bytes that stay allocated between steps, without error feedback."""
        return sum(gradients.accumulated.numel() * 4 for gradients in self._units)

    def feedback_bytes(self) -> int:
        """Return the bytes of the rounding errors that are kept for error feedback."""
        return sum(
            residual.numel() * residual.element_size()
            for gradients in self._units
            for residual in gradients.residuals.values()
        )

    def reset_feedback(self) -> None:
        """Discard the rounding errors of earlier gradients."""
        for gradients in self._units:
            for residual in gradients.residuals.values():
                residual.zero_()

    def _on_gradient(self, gradients: UnitGradients, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return  # the sink has received the gradient
        gradients.add(index, parameter.grad)
        parameter.grad = None
        self._on_arrival(gradients, index)

    def _on_product(
        self,
        gradients: UnitGradients,
        index: int,
        grad_outputs: torch.Tensor,
        inputs: torch.Tensor,
    ) -> None:
        gradients.add_product(index, grad_outputs, inputs)
        self._on_arrival(gradients, index)

    def _on_arrival(self, gradients: UnitGradients, index: int) -> None:
        if gradients.is_complete_with(index):
            self._on_complete(gradients.unit)
            if self._last_micro_batch or gradients.is_sharded:
                self._start_reduction(gradients, self._last_micro_batch)

    def _start_reduction(self, gradients: UnitGradients, last_micro_batch: bool) -> None:
        for chain in self._under_way:
            chain.advance()
        self._under_way.append(Chain(gradients.reduction(last_micro_batch)))
        while len(self._under_way) > self._units_in_flight:
            self._under_way.popleft().wait()
