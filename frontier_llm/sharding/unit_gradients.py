"""The gradients of one unit: the buffers that hold them, and their reduction over ranks.

Parameters, gradients and optimizer states are divided over p, g and o data ranks
(geometry/partition.py); n is the number of elements of the unit's flat buffer. The buffers and the
reduction depend on g:

    g = 1   gradients are accumulated in a buffer of n elements on every rank. In the last
            micro-batch this buffer is reduced over the optimizer group, then the replica group.
    g > 1   in every micro-batch, gradients are written to a new buffer of n elements, which is
            reduced over the params group and the grads group, and added to this rank's interval of
            n/g elements. In the last micro-batch that interval is reduced over the optimizer group,
            then the replica group.

Error feedback, if enabled, keeps the rounding errors of quantised gradients that cross nodes and
adds them to the next gradients that are sent: one or two bytes per element on the sending rank
(collectives/residual.py, which names the sources).
"""

import torch
import torch.distributed as dist

from frontier_llm.collectives.handles import Steps
from frontier_llm.collectives.primitives import all_reduce
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.transport import DTYPES, Transport
from frontier_llm.device.accumulate import accumulate_product
from frontier_llm.geometry.formats import Feedback
from frontier_llm.geometry.partition import Digit, Hop
from frontier_llm.sharding.unit import StateGroups, Unit

_SMALL_PART = 1 / 16


class UnitGradients:
    """The gradients of one unit.

    Attributes:
        accumulated: [n / g] fp32, the sum over micro-batches.
        shard: [n / o] fp32, the part of `accumulated` for the parameters that this rank updates.
        residuals: by hop (geometry/partition.py): the rounding errors of the gradients that are
            reduced over that hop's group; empty without error feedback.
        added: number of gradients that were added in this step, per parameter.
        is_sharded: whether gradients are sharded (g > 1).
        reductions_left: number of reductions of this step that have not started. A step has one
            for each micro-batch if gradients are sharded, else a single one.
    """

    def __init__(
        self, unit: Unit, groups: StateGroups, transport: Transport, feedback: Feedback | None
    ) -> None:
        self.unit, self._groups, self._transport = unit, groups, transport
        self.is_sharded = groups.factors.grads > 1
        self._micro_batches = self.reductions_left = 0
        self.residuals = _make_residuals(unit, groups, transport, feedback) if feedback else {}
        self.accumulated = torch.zeros(
            unit.grads_interval.length, dtype=torch.float32, device=unit.buffer.device
        )
        self.shard = unit.part(self.accumulated, unit.optimizer_interval, unit.grads_interval)
        self.added = [0] * len(unit.records)
        # indices of parameters with a gradient in the buffer that is written to (`_buffer`)
        self._touched: set[int] = set()
        # if sharded: the gradients of this micro-batch in one buffer, until they are reduced
        self._packed: torch.Tensor | None = None
        # if sharded: whether `accumulated` has gradients of this step
        self._has_sum = False

    def begin_step(self, micro_batches: int) -> None:
        """Discard the gradients of the previous step, and expect those of some micro-batches."""
        self._micro_batches = micro_batches
        self.reductions_left = micro_batches if self.is_sharded else 1
        self._touched, self._packed = set(), None
        self.added = [0] * len(self.unit.records)
        self._has_sum = False

    def expect_pass(self) -> None:
        """Expect the gradients of one more micro-batch."""
        self._micro_batches += 1
        self.reductions_left += self.is_sharded

    @property
    def may_defer(self) -> bool:
        """Whether products may be computed later than the backward pass.

        Not those of a table that computes the logits: one of the two operands is the gradient of
        the logits, the largest tensor of the chunk.
        """
        return self.unit.name not in ("embedding", "head")

    def is_small_part(self, index: int) -> bool:
        """Return whether a parameter is a small part of its unit, like the norms of a layer."""
        return self.unit.records[index].parameter.numel() <= _SMALL_PART * self.unit.layout.size

    def note_added(self, index: int) -> bool:
        """Count a gradient that was added; return whether the next reduction can start.

        It can if every parameter has the gradients of one more micro-batch than were reduced, or of
        all micro-batches if gradients are not sharded. Some parameters may have further gradients.
        """
        self.added[index] += 1
        counts = [
            added // record.passes
            for added, record in zip(self.added, self.unit.records, strict=True)
        ]
        assert counts[index] <= self._micro_batches, f"{self.unit.name}: too many gradients"
        return min(counts) > self._micro_batches - self.reductions_left

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient, in the shape of the parameter, to the buffer."""
        target, is_first = self._target(index)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if is_first:
            target.copy_(gradient)
        else:
            target.add_(gradient)

    def add_product(self, index: int, grad_outputs: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add a weight's gradient, given as two operands (`ProductSink`), to the buffer."""
        target, is_first = self._target(index)
        accumulate_product(target, grad_outputs.t(), inputs, add=not is_first)

    def reduction(self) -> Steps:
        """Reduce the gradients over the params and grads groups; in the last reduction over all."""
        self.reductions_left -= 1
        is_last = self.reductions_left == 0
        groups, transport, unit = self._groups, self._transport, self.unit
        if self.is_sharded:
            adds_to_sum, self._has_sum = self._has_sum, True
            yield from transport.reduce(
                self._take_packed(),
                self._hops("params", "grads"),
                unit.layout.decayed,
                "reduce_grads",
                self.accumulated,
                add=adds_to_sum,
                bounds=unit.grads_parts,
            )
        else:
            self._zero_untouched()
        if not is_last:
            return
        over_owners, over_replicas = self._hops("optimizer"), groups.along("replica")
        if over_owners:
            yield from transport.reduce(
                self.accumulated,
                over_owners,
                unit.matrix_elements(unit.grads_interval),
                "reduce_states",
                self.shard,
                bounds=unit.states_parts,
            )
        if not over_replicas:
            return
        if groups.factors.divides_sums:
            yield from transport.all_reduce(
                self.shard,
                over_replicas,
                unit.matrix_elements(unit.optimizer_interval),
                "reduce_states",
                [residual for _, residual in self._hops("replica")],
            )
        else:
            yield all_reduce(self.shard, over_replicas[0], transport.traffic, "reduce_states")

    def _hops(self, *digits: Digit) -> list[tuple[dist.ProcessGroup, Residual | None]]:
        """Return the groups that `StateGroups.along` returns, with their rounding errors."""
        return [
            (group, self.residuals.get(hop))
            for hop, group in self._groups.groups.items()
            if hop.digit in digits
        ]

    def _target(self, index: int) -> tuple[torch.Tensor, bool]:
        """Return where a parameter's gradient is added up, and whether nothing is there yet."""
        assert self.reductions_left, f"gradient of {self.unit.name} arrived after its reduction"
        is_first = index not in self._touched
        self._touched.add(index)
        return self.unit.view(self._buffer(), index), is_first

    def _buffer(self) -> torch.Tensor:
        """Return [n], in which gradients are added up until they are reduced or the step ends."""
        if not self.is_sharded:
            return self.accumulated
        if self._packed is None:
            self._packed = self._new_packed()
        return self._packed

    def _new_packed(self) -> torch.Tensor:
        """Return an undefined buffer [n] in the dtype in which gradients are sent.

        If they are sent quantised, the buffer has the compute dtype, and is borrowed from the
        transport's pool until it is encoded.
        """
        size, transport = self.unit.layout.size, self._transport
        fmt = transport.scatter_format(self._groups.along("params", "grads")[0])
        if fmt.is_quantised:
            return transport.pool.take(size, transport.compute_dtype)
        return torch.empty(size, dtype=DTYPES[fmt.name], device=self.accumulated.device)

    def _take_packed(self) -> torch.Tensor:
        """Return the buffer of this micro-batch, zero where there is no gradient, and forget it."""
        packed = self._buffer()
        packed[self.unit.layout.used :].zero_()
        self._zero_untouched()
        self._packed, self._touched = None, set()
        return packed

    def _zero_untouched(self) -> None:
        """Zero the parts of parameters without a gradient: their contents are old or undefined."""
        for index in range(len(self.unit.records)):
            if index not in self._touched:
                self.unit.view(self._buffer(), index).zero_()


def _make_residuals(
    unit: Unit, groups: StateGroups, transport: Transport, feedback: Feedback
) -> dict[Hop, Residual]:
    """Allocate rounding errors, at first 0, for each hop in which gradients cross nodes."""
    return {
        hop: Residual.zeros(
            hop.width,
            unit.layout.size // hop.high,
            unit.buffer.device,
            feedback.block_elements,
            decay=feedback.decay,
        )
        for hop, group in groups.groups.items()
        if transport.needs_feedback(group, sums=hop.digit == "replica")
    }
