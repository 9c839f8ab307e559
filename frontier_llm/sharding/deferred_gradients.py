"""Weight gradients that a backward pass leaves out, and that are computed later.

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

import torch

from frontier_llm.collectives.handles import Handle

Key = tuple[int, int]
"""A backward pass of a step: index of the model chunk on this rank, number of the micro-batch."""
Gather = Callable[[torch.Tensor], tuple[torch.Tensor, Handle]]
"""Starts to gather a tensor whose parts are on several ranks; returns the whole tensor, and what to
wait for."""


class DeferredGradients:
    """The gradients that were deferred and are not computed yet, by backward pass.

    On a GPU only the stream of the backward pass uses the operands, except for the gathers, which
    are waited for. So their memory can be freed without waits for other streams.
    """

    def __init__(self) -> None:
        self._queues: dict[Key, deque[_Deferred]] = {}
        self._key: Key | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether a backward pass runs whose gradients are deferred."""
        return self._key is not None

    @property
    def is_empty(self) -> bool:
        """Whether all deferred gradients have been computed."""
        return not self._queues

    @property
    def waiting_bytes(self) -> int:
        """Memory of the tensors from which the deferred gradients will be computed.

        Several gradients may be computed from the same tensor, which is counted once.
        """
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for queue in self._queues.values()
            for deferred in queue
            for tensor in deferred.tensors
        }
        return sum(storages.values())

    @contextmanager
    def collecting(self, key: Key) -> Iterator[None]:
        """Return a context for a backward pass whose gradients are deferred."""
        assert self._key is None, "contexts of deferred gradients are nested"
        assert key not in self._queues, f"the weight gradients of {key} were deferred twice"
        self._key, self._queues[key] = key, deque()
        try:
            yield
        finally:
            self._key = None

    def put(
        self,
        tensors: tuple[torch.Tensor, ...],
        add: Callable[..., None],
        gather: Gather | None = None,
    ) -> None:
        """Defer a gradient of the current backward pass.

        Args:
            tensors: the tensors that it is computed from, or the gradient of a small parameter.
            add: called with `tensors`; computes the gradient and adds it.
            gather: gathers the last one of `tensors` from several ranks before `add` is called.
        """
        assert self._key is not None
        # detached, since a tensor with a history would keep the graph of the forward pass
        detached = tuple(tensor.detach() for tensor in tensors)
        self._queues[self._key].append(_Deferred(detached, add, gather))

    def run(self, key: Key) -> None:
        """Compute the deferred gradients of a backward pass, in the order in which they were put.

        The operands of each are freed before the next one is computed. Each gather overlaps with
        the previous product.
        """
        queue = self._queues[key]
        with torch.no_grad():
            if queue:
                queue[0].start_gather()
            while queue:
                if len(queue) > 1:
                    queue[1].start_gather()
                queue.popleft().finish()
        del self._queues[key]


class _Deferred:
    """A gradient that is computed later."""

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        add: Callable[..., None],
        gather: Gather | None,
    ) -> None:
        self.tensors, self._add, self._gather = tensors, add, gather
        self._gathered: tuple[torch.Tensor, Handle] | None = None

    def start_gather(self) -> None:
        """Start to gather the last tensor, if it must be gathered."""
        if self._gather is not None:
            self._gathered = self._gather(self.tensors[-1])

    def finish(self) -> None:
        """Compute the gradient and add it."""
        if self._gathered is None:
            self._add(*self.tensors)
            return
        whole, handle = self._gathered
        handle.wait()
        self._add(*self.tensors[:-1], whole)
