"""Predict seconds of the communication of model states on one stage, without overlap.

The collectives and their bytes are those that geometry/state_traffic.py counts. Data ranks are
numbered by four digits (params, grads, optimizer, replica; geometry/partition.py). Each collective
runs along one digit: between the data ranks that differ only in this digit.

Messages in integer formats are quantised before they are sent and dequantised when they have
arrived. These kernels read and write memory (collectives/blockwise.py) and are computation, so that
they are not hidden.
"""

from dataclasses import dataclass

from frontier_llm.config.engine import EngineConfig
from frontier_llm.geometry.formats import FP32, Format
from frontier_llm.geometry.partition import Digit
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
    """Gradients that are summed once per step."""
    refresh: float
    """Updated parameters, once per step."""


class StateCosts:
    """Costs of communicating the model states of one kind of stage.

    Attributes:
        conversions: seconds to quantise and dequantise messages.
        elements: parameters of the stage on one tensor rank, padding included.
        gather: gathers of all parameters for one forward pass.
        gather_again: gathers of all parameters for one backward pass.
        scatter: reduce-scatters of all gradients in one micro-batch.
        sums: sums of the gradient shards over replicas, once per step.
        refresh: gathers of updated parameters, once per step.
    """

    def __init__(
        self,
        candidate: Candidate,
        kind: StageKind,
        groups: GridGroups,
        engine: EngineConfig,
        speed: Speed,
    ) -> None:
        factors = candidate.factors
        self._layout, self._groups, self._engine = candidate.layout, groups, engine
        self._speed = speed
        self._formats = candidate.layout.formats
        elements = sum(count * factors.padded(size) for size, count in kind.units)
        units = sum(count for _, count in kind.units)
        per_message = engine.message_elements
        self._messages = -(-elements // per_message) if per_message else units
        params_shard, grads_shard = elements / factors.params, elements / factors.grads
        self.elements = elements
        self.gather = self._gather("params", elements, self._formats.params)
        self.gather_again = self._gather_again(elements)
        self.scatter = (
            _added(self._scatter("params", elements), self._scatter("grads", params_shard))
            if factors.grads > 1
            else self._no_cost("params")
        )
        self.sums = _added(
            self._scatter("optimizer", grads_shard), self._all_reduce(elements / factors.optimizer)
        )
        self.refresh = _added(
            self._refresh("optimizer", grads_shard), self._refresh("grads", params_shard)
        )
        formats, owners = self._formats, factors.optimizer // factors.params
        is_sharded = factors.grads > 1
        self.conversions = ConversionSeconds(
            gather=self._gather_conversion(factors.params, elements, formats.params),
            gather_again=self._gather_conversion(factors.params, elements, formats.params_backward),
            scatter=(
                self._scatter_conversion("params", elements)
                + self._scatter_conversion("grads", params_shard)
            ) * is_sharded,
            sums=self._scatter_conversion("optimizer", grads_shard)
            + self._sums_conversion(elements / factors.optimizer),
            refresh=self._refresh_conversion(owners, params_shard),
        )  # fmt: skip

    def _gather(self, digit: Digit, elements: float, message_format: Format) -> Cost:
        """Return the cost of all-gathers along a digit that produce `elements` in total."""
        compute_bytes = self._layout.compute_bytes
        is_lossless = message_format.is_lossless(compute_bytes)
        element_bytes = compute_bytes if is_lossless else message_format.element_bytes
        return self._ring(digit, elements * element_bytes)

    def _refresh(self, digit: Digit, elements: float) -> Cost:
        """Return the cost of distributing `elements` updated parameters along a digit.

        If each owner broadcasts its shard, every rank passes on all elements instead of all but its
        own (AMSP, arXiv:2311.00257, cost of optimizer states).
        """
        gathered = self._gather(digit, elements, self._formats.refresh)
        width, _ = self._group(digit)
        if width == 1 or not self._engine.broadcasts_refresh:
            return gathered
        return Cost(gathered.seconds * width / (width - 1), gathered.link)

    def _scatter(self, digit: Digit, elements: float) -> Cost:
        """Return the cost of reduce-scatters of `elements` along a digit."""
        return self._scatter_in(self._scatter_format(digit), digit, elements)

    def _scatter_in(self, message_format: Format, digit: Digit, elements: float) -> Cost:
        width, stride = self._group(digit)
        if width == 1:
            return self._no_cost(digit)
        sent = gather_bytes(elements * message_format.element_bytes, width)
        span = self._groups.data(width, stride)
        in_bf16 = FP32.bits > message_format.bits and self._engine.exchanges_gradients
        is_measured = "gradient_scatter" in span.measured
        if message_format.is_quantised or (in_bf16 and not is_measured):
            return span.exchange(sent, self._messages)
        return span.collective("gradient_scatter", sent, self._messages)

    def _gather_conversion(self, parts: int, elements: float, message_format: Format) -> float:
        """Return the seconds of the kernels of gathers: one part is quantised, all are dequantised.

        Args:
            parts: number of ranks whose parts are gathered.
            elements: elements that are gathered in total.
            message_format: format of the messages.
        """
        compute_bytes = self._layout.compute_bytes
        if parts == 1 or message_format.is_lossless(compute_bytes):
            return 0.0
        converted = elements * (1 + 1 / parts)
        moved_bytes = converted * (compute_bytes + message_format.element_bytes)
        return self._speed.moved(moved_bytes, 2 * self._messages)

    def _refresh_conversion(self, parts: int, elements: float) -> float:
        """Return the seconds of the kernels of a refresh.

        Differences are taken to the old parameters and added to them: all are read once more, and
        those of one part twice.
        """
        seconds = self._gather_conversion(parts, elements, self._formats.refresh)
        if not seconds or not self._formats.refresh_differences:
            return seconds
        reads = elements * (1 + 1 / parts) * self._layout.compute_bytes
        return seconds + self._speed.moved(reads, 0)

    def _scatter_conversion(self, digit: Digit, elements: float) -> float:
        """Return the seconds of the kernels of reduce-scatters of `elements` fp32 gradients.

        The parts of the other ranks are quantised. A rank adds the parts that have arrived to its
        own, which it reads and writes once.
        """
        return self._reduction_conversion(self._scatter_format(digit), digit, elements)

    def _sums_conversion(self, elements: float) -> float:
        """Return the seconds of the kernels of sums of `elements` over replicas.

        The sums of a rank's part are encoded, and all parts are decoded.
        """
        (width, _), message_format = self._group("replica"), self._formats.sums
        if width == 1 or not self._sums_encoded:
            return 0.0
        moved_bytes = elements * (1 + 1 / width) * (FP32_BYTES + message_format.element_bytes)
        gather_seconds = self._speed.moved(moved_bytes, 2 * self._messages)
        return gather_seconds + self._reduction_conversion(message_format, "replica", elements)

    def _reduction_conversion(self, message_format: Format, digit: Digit, elements: float) -> float:
        width, _ = self._group(digit)
        if width == 1 or not message_format.is_quantised:
            return 0.0
        sent = elements * (width - 1) / width
        moved_bytes = sent * (FP32_BYTES + 2 * message_format.element_bytes)
        moved_bytes += 2 * FP32_BYTES * elements / width
        return self._speed.moved(moved_bytes, 2 * self._messages)

    def _scatter_format(self, digit: Digit) -> Format:
        """Return the format of gradients, which may differ inside a node and between nodes."""
        width, stride = self._group(digit)
        is_inside = self._groups.is_inside_node(width, stride)
        return self._formats.grads if is_inside else self._formats.grads_across

    def _gather_again(self, elements: float) -> Cost:
        """Return the cost of gathers for a backward pass, from a second copy if there is one."""
        copy_ranks = self._engine.second_copy_ranks
        if copy_ranks is None or copy_ranks >= self._layout.factors.params:
            return self._gather("params", elements, self._formats.params_backward)
        sent = gather_bytes(elements * self._layout.compute_bytes, copy_ranks)
        return self._groups.data(copy_ranks, 1).gather(sent, self._messages)

    def _ring(self, digit: Digit, total_bytes: float) -> Cost:
        """Return the cost of an all-gather or reduce-scatter of `total_bytes` along a digit."""
        width, stride = self._group(digit)
        if width == 1:
            return self._no_cost(digit)
        sent = gather_bytes(total_bytes, width)
        return self._groups.data(width, stride).gather(sent, self._messages)

    def _all_reduce(self, elements: float) -> Cost:
        """Return the cost of summing `elements` over replicas."""
        (width, stride), message_format = self._group("replica"), self._formats.sums
        if width == 1:
            return self._no_cost("replica")
        if self._sums_encoded:
            scattered = self._scatter_in(message_format, "replica", elements)
            return _added(scattered, self._ring("replica", elements * message_format.element_bytes))
        sent = all_reduce_bytes(elements * (self._engine.sums_bytes or FP32_BYTES), width)
        return self._groups.data(width, stride).all_reduce(sent, self._messages)

    @property
    def _sums_encoded(self) -> bool:
        """Whether sums over replicas are a reduce-scatter and a gather of encoded parts."""
        return self._formats.encodes_sums and self._engine.sums_bytes is None

    def _no_cost(self, digit: Digit) -> Cost:
        width, stride = self._group(digit)
        return Cost(0.0, self._groups.data(width, stride).link)

    def _group(self, digit: Digit) -> tuple[int, int]:
        """Return the size of a group along a digit, and the distance of its data ranks."""
        factors = self._layout.factors
        return factors.width(digit), factors.stride(digit)


def _added(first: Cost, second: Cost) -> Cost:
    """Return the sum of two costs, with the link of the cost that takes longer."""
    return Cost(first.seconds + second.seconds, max(first, second).link)
