"""Gradients: accumulated in fp32 as the backward pass makes them, reduced as units complete.

The backward of a unit is complete when each of its parameters has got its gradient. What happens
then depends on the factors p | g | o | D (geometry/partition.py):

    g = 1   gradients add up in a buffer of n elements on every rank; in the last micro-batch it
            is reduced along c, then d
    g > 1   in every micro-batch they are packed, reduced along a, then b, and added to the
            interval of n/g elements; in the last one that is reduced along c, then d

Reductions run while the next unit computes. When a unit completes, those under way take one step
more, so that the second hop of one overlaps with the first of the next.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from frontier_llm.collectives.chain import Chain, Steps
from frontier_llm.collectives.reduce import all_reduce
from frontier_llm.collectives.transport import DTYPES, Transport
from frontier_llm.sharding.feedback import Feedback
from frontier_llm.sharding.groups import StateGroups
from frontier_llm.sharding.unit import Unit


class Gradients:
    """The accumulated gradients of all trainable units of a rank.

    Order of calls in a step: `begin_step`, backward passes (all but the last inside
    `accumulating`, each preceded by `begin_backward`), `finish`.
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
    ) -> None:
        """Hook into autograd.

        Args:
            units: the trainable ones.
            groups: along which to reduce.
            transport: sends them, in its formats; they add up in fp32.
            units_in_flight: reductions under way at most.
            on_complete: told when a unit's backward is complete and its parameters unneeded.
            feedback: whether what rounding loses between nodes is kept for the next time.
        """
        self._on_complete = on_complete
        self._units = [_UnitGradients(unit, groups, transport, feedback) for unit in units]
        self._units_in_flight = units_in_flight
        self._under_way: deque[Chain] = deque()
        self._last_micro_batch = True
        for unit in self._units:
            for index, record in enumerate(unit.flat.records):
                record.parameter.register_post_accumulate_grad_hook(
                    partial(self._on_gradient, unit, index)
                )

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        for unit in self._units:
            unit.begin_step()

    def begin_backward(self) -> None:
        """Close the backward pass before this one: a parameter it did not reach gets none."""
        for unit in self._units:
            if unit.is_partial:
                unit.expect_all()
                if unit.is_cut:
                    self._reduce(unit, last_micro_batch=False)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark backward passes after which more will follow in this step."""
        self._last_micro_batch = False
        try:
            yield
        finally:
            self._last_micro_batch = True

    def finish(self) -> None:
        """Reduce what is not yet under way and wait for all; then every interval is whole."""
        for unit in self._units:
            if not unit.is_final:
                self._reduce(unit, last_micro_batch=True)
        while self._under_way:
            self._under_way.popleft().wait()

    def of(self, unit: Unit) -> torch.Tensor:
        """Return [n / o] fp32, this rank's optimizer interval of a unit's gradient."""
        return next(g.own for g in self._units if g.flat is unit)

    def memory_bytes(self) -> int:
        """Return the bytes that stay allocated between steps."""
        return sum(unit.accumulated.numel() * 4 for unit in self._units)

    def forget_errors(self) -> None:
        """Add nothing that rounding lost of earlier gradients to the next ones."""
        for unit in self._units:
            unit.feedback.forget()

    def feedback_bytes(self) -> int:
        """Return the bytes in which rounding errors are kept."""
        return sum(unit.feedback.memory_bytes() for unit in self._units)

    def _on_gradient(self, unit: "_UnitGradients", index: int, _: torch.Tensor) -> None:
        if unit.add(index):
            self._on_complete(unit.flat)
            if self._last_micro_batch or unit.is_cut:
                self._reduce(unit, self._last_micro_batch)

    def _reduce(self, unit: "_UnitGradients", last_micro_batch: bool) -> None:
        for chain in self._under_way:
            chain.advance()
        self._under_way.append(Chain(unit.reduction(last_micro_batch)))
        while len(self._under_way) > self._units_in_flight:
            self._under_way.popleft().wait()


class _UnitGradients:
    """A unit in the middle of a step.

    Attributes:
        flat: the unit.
        accumulated: [n / g] fp32.
        own: [n / o] fp32, the part of it that this rank updates with.
        is_cut: whether gradients are cut (g > 1).
        is_final: whether the reduction of this step's last micro-batch has begun.
    """

    def __init__(
        self, flat: Unit, groups: StateGroups, transport: Transport, feedback: bool
    ) -> None:
        self.flat = flat
        self.is_cut = groups.factors.grads > 1
        self.is_final = False
        self._groups, self._transport = groups, transport
        self.feedback = Feedback(flat, groups, transport, feedback)
        device = flat.whole.device
        self.accumulated = torch.zeros(flat.grads.length, dtype=torch.float32, device=device)
        self.own = flat.part(self.accumulated, flat.optimizer, flat.grads)
        self._waiting = set(range(len(flat.records)))
        self._touched: set[int] = set()
        self._has_sum = False

    @property
    def is_partial(self) -> bool:
        """Whether a backward pass has reached some parameters, and not all."""
        return 0 < len(self._waiting) < len(self.flat.records)

    def expect_all(self) -> None:
        """Wait anew for every parameter's gradient."""
        self._waiting = set(range(len(self.flat.records)))

    def begin_step(self) -> None:
        self.expect_all()
        self._touched = set()
        self.is_final = self._has_sum = False

    def add(self, index: int) -> bool:
        """Take a parameter's gradient; return whether the unit's backward is complete with it."""
        assert not self.is_final, f"gradient of {self.flat.name} arrived after its reduction"
        self._waiting.discard(index)
        if not self.is_cut:
            self._accumulate(index)
        if self._waiting:
            return False
        self.expect_all()
        return True

    def reduction(self, last_micro_batch: bool) -> Steps:
        """Reduce what there is; in the last micro-batch down to this rank's optimizer interval."""
        self.is_final = last_micro_batch
        groups = self._groups
        transport, layout = self._transport, self.flat.layout
        if self.is_cut:
            add, self._has_sum = self._has_sum, True
            yield from transport.reduce(
                self._pack(),
                (groups.a, groups.b),
                layout.decayed,
                "reduce_grads",
                (self.feedback.of("a"), self.feedback.of("b")),
                self.accumulated,
                add=add,
            )
        else:
            self._zero_untouched()
        if not last_micro_batch:
            return
        if groups.c is not None:
            border = self.flat.quantised_border(self.flat.grads)
            yield from transport.reduce(
                self.accumulated,
                (groups.c,),
                border,
                "reduce_states",
                (self.feedback.of("c"),),
                self.own,
            )
        if groups.d is not None:
            yield all_reduce(self.own, groups.d, transport.traffic, "reduce_states")

    def _accumulate(self, index: int) -> None:
        """Move a gradient into the fp32 buffer of the whole unit and free it."""
        parameter = self.flat.records[index].parameter
        home = self.flat.view(self.accumulated, index)
        assert parameter.grad is not None
        if index in self._touched:
            home.add_(parameter.grad)
        else:
            home.copy_(parameter.grad)
            self._touched.add(index)
        parameter.grad = None

    def _zero_untouched(self) -> None:
        """Clear what no backward pass of this step reached: it still holds the last step's."""
        for index in range(len(self.flat.records)):
            if index not in self._touched:
                self.flat.view(self.accumulated, index).zero_()

    def _pack(self) -> torch.Tensor:
        """Move all gradients of this micro-batch into one buffer, [n].

        It has the dtype in which they travel; to be quantised, that in which they were computed,
        and it is the pool's: it is sent at once.
        """
        layout, transport = self.flat.layout, self._transport
        first = self._groups.a or self._groups.b
        assert first is not None
        code = transport.scatter_format(first)
        if code.is_quantised:
            packed = transport.pool.take(layout.size, transport.compute_dtype)
        else:
            device = self.accumulated.device
            packed = torch.empty(layout.size, dtype=DTYPES[code.name], device=device)
        packed[layout.used :].zero_()
        for index, record in enumerate(self.flat.records):
            home, gradient = self.flat.view(packed, index), record.parameter.grad
            if gradient is None:
                home.zero_()
            else:
                home.copy_(gradient)
                record.parameter.grad = None
        return packed
