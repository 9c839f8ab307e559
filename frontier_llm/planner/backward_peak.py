"""Find the moment of a backward pass at which a stage holds most memory.

A backward pass frees the activations of one layer after the other. At the same time it needs memory
for new gradients and for the reductions that are under way. The logits, the temporary tensors of a
layer and the gradient of a table do not exist at the same moment, so their sizes do not add up.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from frontier_llm.geometry.state_memory import FP32_BYTES
from frontier_llm.planner.activations import Activations
from frontier_llm.planner.candidate import Candidate, StageKind, UnitRun


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment of a backward pass."""

    freed: int
    """Activations of this pass that are freed already."""
    reductions: int
    """New gradients, and the buffers of reductions."""
    logits: int
    """Logits and the part of them that the loss holds in fp32."""
    working: int
    """Temporary tensors inside a layer."""

    @property
    def added(self) -> int:
        """Bytes that the stage holds in addition to all kept activations."""
        return self.reductions + self.logits + self.working - self.freed


class BackwardPeak:
    """The moments of the backward passes of one kind of stage, with whole backward passes."""

    def __init__(self, candidate: Candidate, kind: StageKind, activations: Activations) -> None:
        """Initialise.

        Args:
            candidate: the layout.
            kind: kind of the stage.
            activations: the activations of the stage.
        """
        self._candidate, self._layout, self._kind = candidate, candidate.layout, kind
        self._activations = activations
        # bytes of buffers by the elements of a unit, as most units are equal
        self._buffer_bytes: dict[int, tuple[int, int]] = {}

    def fullest(self) -> Moment:
        """Return the moment with the most memory."""
        kind, per_layer = self._kind, self._activations.per_layer
        distinct = {  # most chunks of a stage have equal layers
            (units, per_layer[index], kind.chunks[index].has_head): index
            for index, units in enumerate(kind.chunk_units)
        }
        return max(
            (moment for index in distinct.values() for moment in self._moments(index)),
            key=lambda moment: moment.added,
        )

    def _moments(self, index: int) -> Iterator[Moment]:
        """Yield the moments of the backward pass of a model chunk, of equal layers only the first.

        After a few equal layers, the buffers of reductions do not grow any more.
        """
        chunk, runs = self._kind.chunks[index], self._kind.chunk_units[index]
        hops, in_flight = self._hops(), self._layout.units_in_flight
        per_layer = self._activations.per_layer[index]
        logits = self._activations.logits if chunk.has_head else 0
        working, under_way, freed = self._activations.working, self._left_over(), 0
        standing = self._tied_bytes(index)  # of a table that is also the head
        if logits:
            yield Moment(0, sum(under_way) + standing, logits, 0)
        for run in reversed(runs):
            is_layer = run.what == "layer"
            written, sent = self._buffers(run.elements)
            logits = logits if run.what == "head" else 0
            limit = min(hops, in_flight) + 2 if sent else 1
            for number in range(min(run.count, limit)):
                before = freed + number * per_layer if is_layer else freed
                now = standing + sum(under_way) + written + self._gradient_bytes(run, index)
                yield Moment(before, now, logits, working if is_layer else 0)
                while len(under_way) >= hops:  # each start ends a hop of every reduction
                    under_way.popleft()
                under_way.append(sent)
                yield Moment(before, standing + sum(under_way), logits, 0)
                while len(under_way) > in_flight:
                    under_way.popleft()
            freed += run.count * per_layer if is_layer else 0

    def _left_over(self) -> deque[int]:
        """Return the buffers of reductions that an earlier backward pass has started.

        Reductions of sharded gradients end during the next backward pass: a reduction is waited for
        when `units_in_flight` later ones have started, or as many as it has collectives.
        """
        layout = self._layout
        if layout.factors.grads == 1 or layout.micro_batches * layout.virtual_stages == 1:
            return deque()
        last = [
            [self._buffers(run.elements)[1] for run in runs for _ in range(run.count)]
            for runs in self._kind.chunk_units
        ]
        limit = min(self._hops(), layout.units_in_flight)
        return deque(max((sent[:limit] for sent in last), key=sum))

    def _hops(self) -> int:
        """Return the largest number of collectives in which the gradients of a unit are reduced."""
        return max(1, len(self._layout.factors.collective_hops))

    def _buffers(self, elements: int) -> tuple[int, int]:
        if elements not in self._buffer_bytes:
            self._buffer_bytes[elements] = self._count_buffers(elements)
        return self._buffer_bytes[elements]

    def _count_buffers(self, elements: int) -> tuple[int, int]:
        """Return the bytes of a unit's buffer while it is written, and during its reduction.

        Buffers of quantised gradients are message buffers (geometry/message_memory.py). A
        reduce-scatter by the communication library receives a part, in fp32. Otherwise a rank
        receives the parts of all ranks (collectives/primitives.py).
        """
        layout, config = self._layout, self._candidate.config
        factors, message_format = layout.factors, layout.formats.grads.widest
        elements = factors.padded(elements)
        if message_format.is_quantised or factors.optimizer == 1:
            return 0, 0
        whole = int(elements * message_format.element_bytes)
        by_pairs = config.collectives.pairwise and config.cluster.device.kind == "cpu"
        is_fp32 = message_format.element_bytes == FP32_BYTES
        received = whole
        if is_fp32 and not by_pairs:
            received = whole // factors.collective_hops[0].width if factors.grads > 1 else 0
        if factors.grads > 1:
            return whole, whole + received
        return 0, received if is_fp32 else whole + received

    def _gradient_bytes(self, run: UnitRun, index: int) -> int:
        """Return the bytes of a gradient before it is added to its buffer.

        The gradient of a table is a tensor. Products of other gradients are computed in the buffers
        if the device adds to fp32 (device/accumulate.py); else each is a tensor. Compiled layers
        return all gradients of a layer together.
        """
        config, compute_bytes = self._candidate.config, self._layout.compute_bytes
        if run.what == "table" or config.kernels == "compiled":
            return run.elements * compute_bytes
        adds_to_fp32 = config.cluster.device.kind == "cuda" or compute_bytes == FP32_BYTES
        if config.sharding.fused_gradients and adds_to_fp32:
            return 0
        if run.what != "layer":
            return run.elements * compute_bytes
        return self._activations.matrix[index]

    def _tied_bytes(self, index: int) -> int:
        """Return the bytes of the gradient of a table that is also the head, and of its buffer."""
        has_own_head = any(run.what == "head" for run in self._kind.chunk_units[index])
        if has_own_head or not self._kind.chunks[index].has_head:
            return 0
        table = self._kind.largest_table
        return self._buffers(table)[0] + table * self._layout.compute_bytes
