"""Predict seconds of the communication of model states on one stage, without overlap.

The collectives and their bytes are those that frontier_lab/planning/state_traffic.py counts, along
the hops of geometry/partition.py. The collectives of the hops of a digit run one after the other.

Messages in integer formats are quantised before they are sent and dequantised when they have
arrived. These kernels read and write memory (collectives/blockwise.py). They occupy the device, so
computation does not hide them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from frontier_llm.config.engine import EngineConfig
from frontier_llm.geometry.formats import FP32, Format
from frontier_llm.geometry.grid import Level
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_tables
from frontier_llm.geometry.partition import Digit, Hop
from frontier_llm.geometry.state_memory import FP32_BYTES
from frontier_llm.geometry.wire import all_reduce_bytes, gather_bytes
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost, GridGroups
from frontier_llm.planner.compute import Speed


@dataclass(frozen=True)
class ConversionSeconds:
    """Seconds to quantise and dequantise the messages of each flow."""

    gather: float
    """Parameters of one forward pass."""
    gather_again: float
    """Parameters of one backward pass."""
    scatter: float
    """Gradients of one micro-batch."""
    sums: float
    """Gradient shards, once per step: reduce-scatters along the optimizer digit and sums over
    replicas."""
    refresh: float
    """Updated parameters, once per step."""


class StateCosts:
    """Costs of communicating the model states of one kind of stage.

    `gather` are the gathers of all parameters for one forward pass, `gather_again` those for one
    backward pass, `scatter` the reduce-scatters of all gradients in one micro-batch. Once per step
    come `sums`, the reduce-scatters of the gradient shards along the optimizer digit and their sums
    over replicas, `tied`, and `refresh`, the gathers of updated parameters. `elements` are the
    parameters of the stage on one tensor rank, padding included.
    """

    def __init__(
        self,
        candidate: Candidate,
        kind: StageKind,
        groups: GridGroups,
        engine: EngineConfig,
        speed: Speed,
    ) -> None:
        factors, formats = candidate.factors, candidate.layout.formats
        self._layout, self._groups, self._engine = candidate.layout, groups, engine
        self._factors, self._formats, self._speed = factors, formats, speed
        elements = sum(count * factors.padded(size) for size, count in kind.units)
        units = sum(count for _, count in kind.units)
        per_message = engine.message_elements
        self._messages = -(-elements // per_message) if per_message else units
        self.elements = elements
        self.gather = self._gather("params", formats.params)
        self.gather_again = self._gather_again()
        scatter_hops = (*self._hops("params"), *self._hops("grads"))
        self.scatter = self._total(self._scatter(hop) for hop in scatter_hops)
        self.sums = self._total(
            (*(self._scatter(hop) for hop in self._hops("optimizer")), self._all_reduce())
        )
        if engine.reduces_once and candidate.grid.pipeline > 1:
            self.sums, self.scatter = self._total((self.scatter, self.sums)), self._total(())
        self.tied = self._tied(tied_distance(candidate, kind))
        self.refresh = self._total((self._refresh("optimizer"), self._refresh("grads")))
        params, owners = factors.params, factors.optimizer // factors.params
        gather_conversion = partial(self._gather_conversion, params, elements)
        self.conversions = ConversionSeconds(
            gather=gather_conversion(formats.params),
            gather_again=gather_conversion(formats.params_backward),
            scatter=sum(map(self._scatter_conversion, scatter_hops)),
            sums=sum(map(self._scatter_conversion, self._hops("optimizer")))
            + self._sums_conversion(),
            refresh=self._refresh_conversion(owners, elements / params),
        )

    def _gather(self, digit: Digit, message_format: Format) -> Cost:
        compute_bytes = self._layout.compute_bytes
        is_lossless = message_format.is_lossless(compute_bytes)
        element_bytes = compute_bytes if is_lossless else message_format.element_bytes
        return self._rings(digit, element_bytes)

    def _refresh(self, digit: Digit) -> Cost:
        """Return the cost of distributing updated parameters along a digit.

        If each owner broadcasts its shard, every rank passes on all elements instead of all but its
        own (AMSP, arXiv:2311.00257, cost of optimizer states).
        """
        gathered, width = self._gather(digit, self._formats.refresh), self._factors.width(digit)
        if width == 1 or not self._engine.broadcasts_refresh:
            return gathered
        turns = width * self._engine.refresh_owner_us * 1e-6
        return Cost(gathered.seconds * width / (width - 1) + turns, gathered.link)

    def _scatter(self, hop: Hop) -> Cost:
        """Return the cost of reduce-scatters along a hop.

        Our engine exchanges gradients that are not in fp32 (each rank sends each part directly to
        the rank that sums it), unless a reduce-scatter in this place was measured.
        """
        message_format = self._scatter_format(hop)
        element_bytes = message_format.element_bytes
        sent = gather_bytes(self.elements / hop.low * element_bytes, hop.width)
        span = self._groups.data(hop.width, hop.low)
        exchanges = message_format.bits < FP32.bits and self._engine.exchanges_gradients
        is_measured = "gradient_scatter" in span.measured
        if message_format.is_quantised or (exchanges and not is_measured):
            return span.exchange(sent, self._messages)
        return span.collective("gradient_scatter", sent, self._messages)

    def _gather_conversion(self, parts: int, elements: float, message_format: Format) -> float:
        """Return the seconds of the kernels of gathers of so many elements in total.

        One of `parts` parts is quantised, all are dequantised.
        """
        compute_bytes = self._layout.compute_bytes
        if parts == 1 or message_format.is_lossless(compute_bytes):
            return 0.0
        converted = elements * (1 + 1 / parts)
        moved_bytes = converted * (compute_bytes + message_format.element_bytes)
        return self._speed.quantised(moved_bytes, 2 * self._messages)

    def _refresh_conversion(self, parts: int, elements: float) -> float:
        """Return the seconds of the kernels of a refresh.

        If differences are sent, the kernels also read the old parameters: the one that quantises
        those of its part, the one that dequantises all, to which it adds the differences.
        """
        seconds = self._gather_conversion(parts, elements, self._formats.refresh)
        if not seconds or not self._formats.refresh_differences:
            return seconds
        reads = elements * (1 + 1 / parts) * self._layout.compute_bytes
        return seconds + self._speed.quantised(reads, 0)

    def _scatter_conversion(self, hop: Hop) -> float:
        """Return the seconds of the kernels of reduce-scatters of fp32 gradients along a hop.

        A rank quantises the parts that it sends. It adds the parts that it receives to its own
        part, which it reads and writes once.
        """
        message_format = self._scatter_format(hop)
        if not message_format.is_quantised:
            return 0.0
        sent = gather_bytes(self.elements / hop.low, hop.width)
        moved_bytes = sent * (FP32_BYTES + 2 * message_format.element_bytes)
        moved_bytes += 2 * FP32_BYTES * self.elements / hop.high
        return self._speed.quantised(moved_bytes, 2 * self._messages)

    def _sums_conversion(self) -> float:
        """Return the seconds of the kernels of sums over replicas.

        After the reduce-scatters along the replica digit, a rank encodes the sums of its part and
        decodes those of all parts.
        """
        hops = self._hops("replica")
        if not hops or not self._sums_encoded:
            return 0.0
        elements, width = self.elements / hops[0].low, self._factors.width("replica")
        element_bytes = self._scatter_format(hops[-1]).element_bytes
        moved_bytes = elements * (1 + 1 / width) * (FP32_BYTES + element_bytes)
        gather_seconds = self._speed.quantised(moved_bytes, 2 * self._messages)
        return gather_seconds + sum(map(self._scatter_conversion, hops))

    def _scatter_format(self, hop: Hop) -> Format:
        """Return the format of gradients, which depends on the links that a hop crosses."""
        of_hop = self._formats.sums if hop.digit == "replica" else self._formats.grads
        return of_hop.at(self._level(hop))

    def _level(self, hop: Hop) -> Level:
        return self._groups.level(hop.width, hop.low)

    def _gather_again(self) -> Cost:
        """Return the cost of gathers for a backward pass, from a second copy if there is one."""
        copy_ranks = self._engine.second_copy_ranks
        if copy_ranks is None or copy_ranks >= self._factors.params:
            return self._gather("params", self._formats.params_backward)
        sent = gather_bytes(self.elements * self._layout.compute_bytes, copy_ranks)
        return self._groups.data(copy_ranks, 1).gather(sent, self._messages)

    def _all_reduce(self) -> Cost:
        whole, hops = self._factors.whole("replica"), self._hops("replica")
        if not hops:
            return self._total(())
        if self._sums_encoded:
            gathered = self._rings("replica", self._scatter_format(hops[-1]).element_bytes)
            return self._total((*map(self._scatter, hops), gathered))
        element_bytes: float = self._engine.sums_bytes or FP32_BYTES
        if self._engine.sums_bytes is None and not self._engine.exchanges_gradients:
            messages = self._formats.grads.at(self._level(whole))
            element_bytes = FP32_BYTES if messages.is_quantised else messages.element_bytes
        sent = all_reduce_bytes(self.elements / whole.low * element_bytes, whole.width)
        return self._groups.data(whole.width, whole.low).all_reduce(sent, self._messages)

    def _rings(self, digit: Digit, element_bytes: float) -> Cost:
        return self._total(
            self._groups.data(hop.width, hop.low).gather(
                gather_bytes(self.elements / hop.low * element_bytes, hop.width), self._messages
            )
            for hop in self._hops(digit)
        )

    def _tied(self, distance: int) -> Cost:
        """Return the cost of summing the gradients of a tied table, once per step."""
        layout = self._layout
        if not distance:
            return Cost(0.0, "")
        rows = padded_vocabulary(layout.model, layout.grid.tensor) / layout.grid.tensor
        shard_bytes = FP32_BYTES * (rows * layout.model.hidden / self._factors.optimizer)
        return self._groups.send(all_reduce_bytes(shard_bytes, 2), stages=distance)

    def _total(self, costs: Iterable[Cost]) -> Cost:
        """Return the sum of costs, with the link of the cost that takes longest."""
        total = longest = Cost(0.0, self._groups.data(1, 1).link)
        for cost in costs:
            longest = max(longest, cost)
            total = Cost(total.seconds + cost.seconds, longest.link)
        return total

    def _hops(self, digit: Digit) -> tuple[Hop, ...]:
        """Return the hops of a digit; engines that do not exchange gradients have one per digit."""
        if self._engine.exchanges_gradients or self._factors.width(digit) == 1:
            return self._factors.hops(digit)
        return (self._factors.whole(digit),)

    @property
    def _sums_encoded(self) -> bool:
        """Whether sums over replicas are a reduce-scatter and a gather of encoded parts."""
        engine = self._engine
        return (
            self._formats.encodes_sums and engine.sums_bytes is None and engine.exchanges_gradients
        )


def tied_distance(candidate: Candidate, kind: StageKind) -> int:
    """Return how many stages apart the copies of a tied table are; 0 = the kind sums none up.

    A tied table is both embedding and head. Stages with copies of it add up their gradients.
    """
    model, chunks = candidate.layout.model, candidate.layout.model_chunks

    def has_table(chunk: ModelChunk) -> bool:
        return chunk.has_head or "embedding" in chunk_tables(model, chunk)

    def count() -> int:
        stages = [chunk.stage for chunk in filter(has_table, chunks)]
        return abs(stages[-1] - stages[0]) * any(map(has_table, kind.chunks))

    return candidate.stages.once(("tied", kind.first), count) if model.tied else 0
