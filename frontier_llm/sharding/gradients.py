"""Gradients: accumulated in fp32 as the backward pass makes them, reduced as units complete.

The backward of a unit is complete when each of its parameters has got its gradient. In the last
micro-batch its reduction starts right then and runs while the next unit computes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from frontier_llm.collectives.handle import Handle
from frontier_llm.sharding.flat_buffer import FlatUnit

Reduce = Callable[[FlatUnit], Handle]


class Gradients:
    """The accumulated gradients of all units of a rank.

    Order of calls in a step: `begin_step`, backward passes (all but the last inside
    `accumulating`), `finish`.
    """

    def __init__(self, units: Sequence[FlatUnit], reduce: Reduce) -> None:
        self._units = [_AccumulatingUnit(unit) for unit in units]
        self._reduce = reduce
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

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark backward passes after which more will follow in this step: nothing is reduced."""
        self._last_micro_batch = False
        try:
            yield
        finally:
            self._last_micro_batch = True

    def finish(self) -> None:
        """Reduce what is not yet under way and wait for all; then every gradient is whole."""
        for unit in self._units:
            unit.zero_untouched()
            if unit.handle is None:
                unit.handle = self._reduce(unit.flat)
        for unit in self._units:
            assert unit.handle is not None
            unit.handle.wait()

    def _on_gradient(self, unit: "_AccumulatingUnit", index: int, _: torch.Tensor) -> None:
        unit.add(index)
        if unit.is_complete and self._last_micro_batch:
            unit.handle = self._reduce(unit.flat)


class _AccumulatingUnit:
    """A unit in the middle of a step."""

    def __init__(self, flat: FlatUnit) -> None:
        self.flat = flat
        self.handle: Handle | None = None
        self._views = [flat.view(flat.gradients, i) for i in range(len(flat.records))]
        self._touched = [False] * len(self._views)
        self._waiting = set(range(len(self._views)))

    def begin_step(self) -> None:
        self.handle = None
        self._touched = [False] * len(self._views)
        self._waiting = set(range(len(self._views)))

    @property
    def is_complete(self) -> bool:
        """Whether the current backward pass has reached every parameter (then waits anew)."""
        if self._waiting:
            return False
        self._waiting = set(range(len(self._views)))
        return True

    def add(self, index: int) -> None:
        """Move a parameter's gradient into the fp32 buffer and free it."""
        assert self.handle is None, f"gradient of {self.flat.name} arrived after its reduction"
        parameter = self.flat.records[index].parameter
        assert parameter.grad is not None
        if self._touched[index]:
            self._views[index].add_(parameter.grad)
        else:
            self._views[index].copy_(parameter.grad)
            self._touched[index] = True
        parameter.grad = None
        self._waiting.discard(index)

    def zero_untouched(self) -> None:
        """Clear what no backward pass of this step reached: it still holds the last step's."""
        for view, touched in zip(self._views, self._touched, strict=True):
            if not touched:
                view.zero_()
