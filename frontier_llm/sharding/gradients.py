"""Gradients: accumulated during the backward pass, and reduced as units complete.

When each parameter of a unit has its gradient of a micro-batch, the reduction of these gradients
over ranks starts (sharding/unit_gradients.py), if there is one in this micro-batch.

A gradient comes from autograd as a tensor, which is copied or added to a buffer and freed, or from
a linear layer as the two operands of a matrix product, which is computed in the buffer
(`ProductSink` in protocols.py). Most gradients are such products. A product may be deferred until
after the backward pass (sharding/deferred_gradients.py).

Reductions run while the next unit computes. A reduction is a sequence of collectives. When a unit
completes, every reduction under way starts its next collective, so that the second collective of
one unit overlaps with the first collective of the next unit.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from frontier_llm.collectives.handles import Chain
from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.formats import Feedback
from frontier_llm.protocols import ParameterRecord, set_product_sink
from frontier_llm.sharding.deferred_gradients import Contribution, DeferredGradients, Key, Sink
from frontier_llm.sharding.unit import StateGroups, Unit
from frontier_llm.sharding.unit_gradients import UnitGradients


class Gradients:
    """The gradients of a rank's trainable units.

    Order of calls in a step: `begin_step`; backward passes; `finish`. Ranks that reduce gradients
    together must add gradients of the same parameters, in the same order, unless each backward pass
    lies between `begin_pass` and `end_pass`: reductions then start in the order of the units, and
    sum zeros for a parameter without a gradient.

    Args:
        units: the trainable units.
        units_in_flight: if a reduction starts and more than so many are under way, the oldest is
            waited for.
        release: called with a unit when a backward pass does not read its parameters any more.
        fuse: whether parameters get a sink, so that layers give gradients as two operands.

    Attributes:
        deferred: the gradients that are left out of the backward passes and computed later.
        before_gradient: called before each gradient that is computed; None = nothing is.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: StateGroups,
        transport: Transport,
        units_in_flight: int,
        release: Callable[[Unit], None],
        *,
        feedback: Feedback | None,
        fuse: bool,
    ) -> None:
        self.deferred = DeferredGradients()
        self._release, self._fuse = release, fuse
        # by unit: indices of parameters that the current backward pass does not read any more
        self._read: dict[Unit, set[int]] = {unit: set() for unit in units}
        self._units = [UnitGradients(unit, groups, transport, feedback) for unit in units]
        self._units_in_flight = units_in_flight
        self._under_way: deque[Chain] = deque()
        self.before_gradient: Callable[[], None] | None = None
        # in a pass: units whose reductions have not started, in the order in which they must start
        self._waiting: deque[UnitGradients] | None = None
        self._complete: set[UnitGradients] = set()
        self._hooks = []
        for gradients in self._units:
            for index, record in enumerate(gradients.unit.records):
                hook = partial(self._on_gradient, gradients, index)
                self._hooks.append(record.parameter.register_post_accumulate_grad_hook(hook))
                if fuse:
                    set_product_sink(
                        record.parameter, Sink(gradients, index, self.deferred, self.take)
                    )

    def close(self) -> None:
        """Remove the hooks. Python cannot see that they and the parameters are a cycle."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self, micro_batches: int) -> None:
        """Discard the gradients of the previous step, and expect those of some micro-batches."""
        for gradients in self._units:
            gradients.begin_step(micro_batches)

    def begin_backward(self, unit: Unit) -> None:
        """Expect a pass to read a unit, which is released when all parameters have a gradient."""
        self._read[unit] = set()

    def begin_pass(self) -> None:
        """Begin a backward pass that may compute other gradients than those of other ranks."""
        self._read = {unit: set() for unit in self._read}
        self._waiting, self._complete = deque(reversed(self._units)), set()

    def end_pass(self, left: int) -> None:
        """Start the remaining reductions of a backward pass, which so many passes follow."""
        waiting, self._waiting = self._waiting, None
        for gradients in waiting or ():
            while gradients.reductions_left > (left if gradients.is_sharded else min(left, 1)):
                self._start_reduction(gradients)

    def expect_pass(self) -> None:
        """Expect the gradients of one more micro-batch in this step."""
        for gradients in self._units:
            gradients.expect_pass()

    def drop(self, micro_batches: int) -> None:
        """Discard all gradients of a step that is repeated, after its reductions have ended."""
        self._waiting = None
        while self._under_way:
            self._under_way.popleft().wait()
        self.begin_step(micro_batches)

    def counts(self) -> list[tuple[ParameterRecord, int]]:
        """Return how many gradients each parameter got on this rank in this step."""
        return [
            pair for unit in self._units for pair in zip(unit.unit.records, unit.added, strict=True)
        ]

    def finish(self) -> None:
        """Start the reductions that still wait for gradients, and wait until all have ended."""
        assert self.deferred.is_empty, "deferred weight gradients were not computed"
        for gradients in self._units:
            while gradients.reductions_left:
                self._start_reduction(gradients)
        while self._under_way:
            self._under_way.popleft().wait()

    def shards(self) -> list[torch.Tensor]:
        """Return, per unit, [n / o] fp32: the gradients of this rank's optimizer interval."""
        return [gradients.shard for gradients in self._units]

    def memory_bytes(self) -> int:
        """Return the bytes that stay allocated between steps, without error feedback."""
        return sum(gradients.accumulated.numel() * 4 for gradients in self._units)

    def feedback_bytes(self) -> int:
        """Return the bytes of rounding errors."""
        return sum(
            residual.nbytes
            for gradients in self._units
            for residual in gradients.residuals.values()
        )

    def reset_feedback(self) -> None:
        """Discard the rounding errors of earlier gradients."""
        for gradients in self._units:
            for residual in gradients.residuals.values():
                residual.reset()

    def _on_gradient(self, gradients: UnitGradients, index: int, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return  # the sink has received the gradient
        defer = self._fuse and self.deferred.is_collecting and gradients.is_small_part(index)
        self.take(Contribution(gradients, index, (gradient,)), defer=defer)

    def take(self, contribution: Contribution, *, defer: bool) -> None:
        """Add what a backward pass has computed, now or later (`run_deferred`)."""
        if self.before_gradient is not None:
            self.before_gradient()
        unit = contribution.unit.unit
        if defer:
            self.deferred.put(contribution)
        else:
            contribution.add()
        self._read[unit].add(contribution.index)
        if len(self._read[unit]) == len(unit.records):
            self._release(unit)
        if not defer:
            self._note_added(contribution)

    def run_deferred(self, key: Key) -> None:
        """Add deferred gradients; collective over the tensor group and the reduction groups."""
        for contribution in self.deferred.run(key):
            self._note_added(contribution)

    def _note_added(self, contribution: Contribution) -> None:
        if not contribution.unit.note_added(contribution.index):
            return
        if self._waiting is None:
            self._start_reduction(contribution.unit)
            return
        self._complete.add(contribution.unit)
        while self._waiting and self._waiting[0] in self._complete:
            self._start_reduction(self._waiting.popleft())

    def _start_reduction(self, gradients: UnitGradients) -> None:
        for chain in self._under_way:
            chain.advance()
        self._under_way.append(Chain(gradients.reduction()))
        while len(self._under_way) > self._units_in_flight:
            self._under_way.popleft().wait()
