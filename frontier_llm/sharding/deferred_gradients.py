"""Gradients on their way to the buffers that add them up, some of them computed later.

A pipeline stage can send the gradient of its inputs earlier if it computes the gradients of its
weights later, for example when it would otherwise wait for other stages. The gradient of a weight
is the product of two operands, which stay allocated until then: the inputs of each linear layer,
and the gradients of its outputs. The gradients of small parameters of a layer, such as norms and
biases, are computed in the backward pass and kept until those of its weights are computed. So all
gradients of a micro-batch are added to their buffer at the same time, and each reduction sums the
gradients of a single micro-batch.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from frontier_llm.collectives.handles import Handle
from frontier_llm.sharding.unit_gradients import UnitGradients

Key = tuple[int, int]
"""A backward pass of a step: index of the model chunk on this rank, number of the micro-batch."""
Gather = Callable[[torch.Tensor], tuple[torch.Tensor, Handle]]
"""Starts to gather a tensor whose parts are on several ranks; returns the whole tensor, and what to
wait for."""


@dataclass(eq=False)
class Contribution:
    """What one backward pass adds to the gradient of one parameter."""

    unit: UnitGradients
    index: int
    """Index of the parameter in the unit."""
    operands: tuple[torch.Tensor, ...]
    """The gradient in the shape of the parameter; or the two factors of the gradient of a weight
    [out, in]: the gradient of the outputs [tokens, out] and the inputs [tokens, in]."""
    gather: Gather | None = None
    """Gathers the inputs from the tensor-parallel ranks, of which each has some of the tokens."""
    gathered: tuple[torch.Tensor, Handle] | None = None
    """What `gather` has returned."""

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


class DeferredGradients:
    """The gradients that were deferred and are not computed yet, by backward pass.

    On a GPU only the stream of the backward pass uses the operands, except for the gathers, which
    are waited for. So their memory can be freed without waits for other streams.
    """

    def __init__(self) -> None:
        self._queues: dict[Key, deque[Contribution]] = {}
        self._key: Key | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether a backward pass runs whose gradients are deferred."""
        return self._key is not None

    @property
    def is_empty(self) -> bool:
        """Whether all deferred gradients have been computed."""
        return not self._queues

    @contextmanager
    def collecting(self, key: Key) -> Iterator[None]:
        """Return a context for a backward pass that leaves out the gradients of layers' weights.

        `Gradients.run_deferred` must follow before the step ends. Until then the operands of these
        gradients stay allocated. No parameter is read after the context.
        """
        assert self._key is None, "contexts of deferred gradients are nested"
        assert key not in self._queues, f"the weight gradients of {key} were deferred twice"
        self._key, self._queues[key] = key, deque()
        try:
            yield
        finally:
            self._key = None

    def put(self, contribution: Contribution) -> None:
        """Defer a gradient of the current backward pass."""
        assert self._key is not None
        # without the graph of the forward pass, which would stay in memory
        operands = tuple(operand.detach() for operand in contribution.operands)
        self._queues[self._key].append(replace(contribution, operands=operands))

    def run(self, key: Key) -> Iterator[Contribution]:
        """Add the deferred gradients of a backward pass, in the order in which they were put.

        Yield each of them afterwards. Its operands are freed before the next one is computed. Each
        gather overlaps with the previous product.
        """
        queue = self._queues[key]
        with torch.no_grad():
            if queue:
                queue[0].start_gather()
            while queue:
                if len(queue) > 1:
                    queue[1].start_gather()
                contribution = queue.popleft()
                contribution.add()
                yield contribution
        del self._queues[key]


class Sink:
    """The `ProductSink` of a parameter: makes contributions to its gradient."""

    def __init__(
        self,
        gradients: UnitGradients,
        index: int,
        deferred: DeferredGradients,
        take: Callable[..., None],
    ) -> None:
        self._gradients, self._index, self._deferred = gradients, index, deferred
        self._take = take

    @property
    def is_deferring(self) -> bool:
        """Whether the product is computed later than in this backward pass."""
        return self._gradients.may_defer and self._deferred.is_collecting

    def __call__(
        self, grad_outputs: torch.Tensor, inputs: torch.Tensor, gather: Gather | None = None
    ) -> None:
        """Take the operands."""
        operands = (grad_outputs, inputs)
        contribution = Contribution(self._gradients, self._index, operands, gather)
        self._take(contribution, defer=self.is_deferring)
