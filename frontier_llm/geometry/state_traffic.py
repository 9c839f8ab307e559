"""Count the bytes of model states that ranks send in a step, inside nodes and between nodes.

The sharding factors are p for parameters, g for gradients and o for optimizer states; D is the
number of data ranks. The data ranks that differ only in one digit (params, grads, optimizer or
replica; partition.py) form a group "along" this digit. For a unit of n elements and M micro-batches
per step, a rank takes part in these flows:

    flow            times  collectives
    gather_params   2M     all-gather n along params: once for the forward and once for the backward
                           pass, unless the unit stays gathered (unit_gathers.count_gathers)
    reduce_grads    M      reduce-scatter n along params, then n/p along grads; nothing if g = 1
    reduce_states   1      reduce-scatter n/g along optimizer, then all-reduce n/o along replica
                           (if sums are not sent in fp32: reduce-scatter and all-gather n/o)
    refresh_params  1      all-gather n/g along optimizer, then n/p along grads

A collective over a single rank sends nothing. Bytes are counted as for rings (wire.py). With gloo,
gathers and reduce-scatters are messages between all pairs of ranks, which send the same number of
bytes over other links. If `formats` is given, quantised messages are counted in slots (formats.py),
including scales and padding.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.geometry.formats import FP32, Format, StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Digit, Factors
from frontier_llm.geometry.wire import Sent, all_reduce_bytes, gather_bytes, pairs_sent, ring_sent


class Gathers(NamedTuple):
    """Number of times that a unit is gathered per step, for forward and for backward passes."""

    forward: int
    backward: int


class Flow(NamedTuple):
    """The bytes of a unit that a rank sends per step in the collectives along one digit."""

    name: str
    """Name of the flow, such as `gather_params`."""
    digit: Digit
    sent_bytes: float
    pairs: bool = False
    """Whether these are messages between all pairs of ranks; otherwise a ring."""


class Cut(NamedTuple):
    """A buffer that is divided into equal parts for one collective."""

    parts: int
    elements: int
    """Elements of one part."""
    border: int
    """Number of elements at the start of the buffer that may be quantised."""


@dataclass(frozen=True)
class StateTraffic:
    """Counts the bytes of model states that a rank sends in one step."""

    grid: Grid
    factors: Factors
    micro_batches: int
    """Micro-batches per replica and step."""
    params_bytes: float
    """Bytes per element of the parameters in gathers and in the refresh."""
    grads_bytes: float = 4.0
    """Bytes per element of the gradients in reduce-scatters."""
    sums_bytes: float = 4.0
    """Bytes per element of the summed gradients in the all-reduce over replicas."""
    gathers_per_micro_batch: int = 2
    """2: one gather for each pass; 1: parameters stay gathered between the forward and the backward
    pass."""
    pairs: bool = False
    """Whether gathers and reduce-scatters are messages between all pairs of ranks, not rings."""
    formats: StateFormats | None = None
    """Number formats of all flows. If they are given, `params_bytes` is the size of the compute
    format, and `grads_bytes` is not used."""

    def unit(
        self,
        rank: int,
        elements: int,
        gathers: int | Gathers | None = None,
        decayed: int | None = None,
    ) -> dict[str, Sent]:
        """Return the bytes of one unit that a rank sends, by flow. Flows without bytes are absent.

        Args:
            rank: rank in the grid.
            elements: size of the buffer of the unit, padding included.
            gathers: gathers of this unit per step; None = `gathers_per_micro_batch` in each
                micro-batch.
            decayed: number of elements before the norms and biases (`FlatLayout.decayed`), which
                may be quantised; None = all elements.
        """
        if gathers is None:
            gathers = self.micro_batches * self.gathers_per_micro_batch
        if isinstance(gathers, int):
            gathers = Gathers(gathers - gathers // 2, gathers // 2)
        border = elements if decayed is None else decayed
        sent: defaultdict[str, Sent] = defaultdict(Sent)
        position = self.grid.coordinates(rank).data
        for flow in self._flows(rank, elements, gathers, border):
            if flow.sent_bytes:
                by_link = pairs_sent if flow.pairs else ring_sent
                group = self._group(flow.digit, rank, position)
                sent[flow.name] += by_link(self.grid, rank, group, flow.sent_bytes)
        return dict(sent)

    def rank(self, rank: int, units: Sequence[int]) -> dict[str, Sent]:
        """Return the bytes that a rank sends by flow; `units` are the sizes of its units."""
        if self.formats is None:
            return self.unit(rank, sum(units))  # the bytes of every flow are proportional to n
        total: defaultdict[str, Sent] = defaultdict(Sent)
        for elements in units:
            for name, sent in self.unit(rank, elements).items():
                total[name] += sent
        return dict(total)

    def _flows(self, rank: int, elements: int, gathers: Gathers, border: int) -> Iterator[Flow]:
        """Yield the flows of one unit; its first `border` elements may be quantised."""
        factors, times = self.factors, self.micro_batches
        position = self.grid.coordinates(rank).data
        params = factors.params_interval(elements, position)
        grads = factors.grads_interval(elements, position)
        optimizer_length = elements // factors.optimizer
        # positions of the border inside the intervals of this rank
        params_border = max(0, min(border - params.start, params.length))
        grads_border = max(0, min(border - grads.start, grads.length))
        over_params = Cut(factors.params, params.length, border)
        over_grads = Cut(factors.width("grads"), grads.length, params_border)
        over_optimizer = Cut(factors.width("optimizer"), optimizer_length, grads_border)
        formats = self.formats or StateFormats()
        yield self._gather("params", over_params, gathers.forward, formats.params)
        yield self._gather("params", over_params, gathers.backward, formats.params_backward)
        yield self._scatter("reduce_grads", "params", over_params, times, rank)
        yield self._scatter("reduce_grads", "grads", over_grads, times, rank)
        yield self._scatter("reduce_states", "optimizer", over_optimizer, 1, rank)
        optimizer_start = factors.optimizer_interval(elements, position).start
        yield from self._sums(optimizer_length, border - optimizer_start, formats.sums)
        refreshed = Cut(over_grads.parts * over_optimizer.parts, optimizer_length, params_border)
        yield from self._refresh(refreshed, formats.refresh)

    def _gather(self, digit: Digit, cut: Cut, times: int, message_format: Format) -> Flow:
        if self.formats is None or message_format.is_lossless(round(self.params_bytes)):
            total_bytes = cut.parts * cut.elements * self.params_bytes
            sent_bytes = times * gather_bytes(total_bytes, cut.parts)
            return Flow("gather_params", digit, sent_bytes, self.pairs)
        sent_bytes = times * _slots_bytes(cut, message_format)
        return Flow("gather_params", digit, sent_bytes, self.pairs)

    def _scatter(self, name: str, digit: Digit, cut: Cut, times: int, rank: int) -> Flow:
        message_format = self._scatter_format(digit, rank)
        if message_format is None:
            total_bytes = cut.parts * cut.elements * self.grads_bytes
            return Flow(name, digit, times * gather_bytes(total_bytes, cut.parts), self.pairs)
        return self._scatter_in(message_format, name, digit, cut, times)

    def _scatter_in(
        self, message_format: Format, name: str, digit: Digit, cut: Cut, times: int
    ) -> Flow:
        """Return a reduce-scatter, which is a ring only in fp32 (primitives.ReduceScatter)."""
        if message_format.is_quantised:
            return Flow(name, digit, times * _slots_bytes(cut, message_format), pairs=True)
        total_bytes = cut.parts * cut.elements * message_format.element_bytes
        pairs = self.pairs or message_format.bits < FP32.bits
        return Flow(name, digit, times * gather_bytes(total_bytes, cut.parts), pairs)

    def _sums(self, elements: int, border: int, message_format: Format) -> Iterator[Flow]:
        """Yield the sums of `elements` over replicas, of which `border` may be quantised."""
        replicas = self.factors.width("replica")
        if self.formats is None or message_format.is_lossless(FP32.bits // 8):
            sent_bytes = all_reduce_bytes(elements * self.sums_bytes, replicas)
            yield Flow("reduce_states", "replica", sent_bytes)
            return
        cut = Cut(replicas, elements // replicas, max(0, min(border, elements)))
        yield self._scatter_in(message_format, "reduce_states", "replica", cut, 1)
        gathered = _slots_bytes(cut, message_format)
        yield Flow("reduce_states", "replica", gathered, self.pairs)

    def _refresh(self, cut: Cut, message_format: Format) -> Iterator[Flow]:
        """Yield the gather along `optimizer`, and the gather of its result along `grads`."""
        grads_width, optimizer_width = self.factors.width("grads"), self.factors.width("optimizer")
        part_bytes = cut.elements * self.params_bytes
        if self.formats is not None and not message_format.is_lossless(round(self.params_bytes)):
            part_bytes = message_format.slot_bytes(cut.elements, cut.parts, cut.border)
        gathered = part_bytes * optimizer_width
        sent_bytes = gather_bytes(gathered, optimizer_width)
        yield Flow("refresh_params", "optimizer", sent_bytes, self.pairs)
        sent_bytes = gather_bytes(gathered * grads_width, grads_width)
        yield Flow("refresh_params", "grads", sent_bytes, self.pairs)

    def _scatter_format(self, digit: Digit, rank: int) -> Format | None:
        """Return the format of gradients that are scattered along a digit; None = not given."""
        if self.formats is None:
            return None
        group = self._group(digit, rank, self.grid.coordinates(rank).data)
        return self.formats.grads_over([self.grid.node(member) for member in group])

    def _group(self, digit: Digit, rank: int, position: int) -> list[int]:
        """Return the ranks of the group along a digit; `position` is the data rank of `rank`."""
        ranks = self.grid.data_group(rank)
        return [ranks[member] for member in self.factors.group(digit, position)]


def _slots_bytes(cut: Cut, message_format: Format) -> int:
    """Return the bytes of the slots that a rank sends to the other ranks in one collective."""
    return message_format.slot_bytes(cut.elements, cut.parts, cut.border) * (cut.parts - 1)
