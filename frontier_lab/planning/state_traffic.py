"""Count the bytes of model states that ranks send in a step, by the level of links.

For a unit of n elements and M micro-batches per step, a rank takes part in these flows, along the
digits and with the sharding factors p, g, o of geometry/partition.py:

    flow            times  collectives
    gather_params   2M     all-gather n along params: once for the forward and once for the backward
                           pass, unless the unit stays gathered (`unit_gathers.py`)
    reduce_grads    M      reduce-scatter n along params, then n/p along grads; nothing if g = 1
    reduce_states   1      reduce-scatter n/g along optimizer, then all-reduce n/o along replica
                           (if sums are not sent in fp32: reduce-scatter and all-gather n/o)
    refresh_params  1      all-gather n/g along optimizer, then n/p along grads

A digit that is divided into hops has one collective per hop: reduce-scatters from the nearest to
the farthest hop, gathers in the reverse order. A message is encoded once per gather, and passed on
in the next hop. Quantised messages are counted in slots (geometry/formats.py).

Bytes are counted as for rings (geometry/wire.py). With gloo, gathers and reduce-scatters are
messages between all pairs of ranks, which send the same number of bytes over other links. So are
those of buffers whose intervals differ in length (`partition.Cut`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from frontier_lab.planning.unit_gathers import Gathers
from frontier_llm.geometry.formats import FP32, Format, StateFormats
from frontier_llm.geometry.grid import Grid, Level
from frontier_llm.geometry.partition import Cut, Digit, Factors, Hop
from frontier_llm.geometry.state_memory import FP32_BYTES
from frontier_llm.geometry.wire import (
    Sent,
    all_reduce_bytes,
    gather_bytes,
    pairs_sent,
    ring_sent,
    unequal_sent,
)

ALL_FP32 = StateFormats()


class Flow(NamedTuple):
    """The bytes of a unit that a rank sends per step in the collectives along one hop."""

    name: str
    hop: Hop
    sent_bytes: float
    pairs: bool = False
    """Whether these are messages between all pairs of ranks; otherwise a ring."""
    to_each: tuple[float, ...] = ()
    """The bytes sent to each rank of the group, if they differ; `sent_bytes` is their sum."""


class Buffer(NamedTuple):
    """The flat buffer of a unit on a rank."""

    cut: Cut
    border: int
    """Number of elements at the start of the buffer that may be quantised."""
    rank: int
    data_rank: int

    def length(self, ranks: int) -> int:
        """Return the length of the rank's interval if the buffer is divided over `ranks` ranks."""
        if not self.cut.bounds:
            return self.cut.size // ranks
        replicas = max(1, ranks // self.cut.factors.optimizer)
        return self.cut.interval(self.data_rank, ranks // replicas).length // replicas


@dataclass(frozen=True)
class StateTraffic:
    """Counts the bytes of model states that a rank sends in one step."""

    grid: Grid
    factors: Factors
    micro_batches: int
    params_bytes: int
    """Bytes per element of the parameters, in the compute format."""
    formats: StateFormats = ALL_FP32
    pairs: bool = False
    """Whether gathers and reduce-scatters are messages between all pairs of ranks, not rings."""

    def unit(
        self,
        rank: int,
        elements: int,
        gathers: Gathers | None = None,
        decayed: int | None = None,
        bounds: tuple[int, ...] = (),
    ) -> dict[str, Sent]:
        """Return the bytes of one unit that a rank sends, by flow. Flows without bytes are absent.

        `elements`, `decayed` and `bounds` are those of `FlatLayout`; without `decayed` all elements
        may be quantised. None gathers = one for each pass.
        """
        gathers = gathers or Gathers(self.micro_batches, self.micro_batches)
        border = elements if decayed is None else decayed
        cut = Cut(self.factors, elements, bounds)
        buffer = Buffer(cut, border, rank, self.grid.coordinates(rank).data)
        sent: defaultdict[str, Sent] = defaultdict(Sent)
        for flow in self._flows(buffer, gathers):
            if not flow.sent_bytes:
                continue
            group = self._group(flow.hop, rank)
            if flow.to_each:
                sent[flow.name] += unequal_sent(self.grid, rank, group, flow.to_each)
            else:
                by_link = pairs_sent if flow.pairs else ring_sent
                sent[flow.name] += by_link(self.grid, rank, group, flow.sent_bytes)
        return dict(sent)

    def _flows(self, buffer: Buffer, gathers: Gathers) -> Iterator[Flow]:
        factors, formats = self.factors, self.formats
        params = zip(gathers, (formats.params, formats.params_backward), strict=True)
        for times, message_format in params:
            yield from self._gather("gather_params", ("params",), buffer, message_format, times)
        for hop in (*factors.hops("params"), *factors.hops("grads")):
            yield self._scatter("reduce_grads", hop, buffer, self.micro_batches)
        for hop in factors.hops("optimizer"):
            yield self._scatter("reduce_states", hop, buffer, 1)
        yield from self._sums(buffer)
        yield from self._gather(
            "refresh_params", ("grads", "optimizer"), buffer, formats.refresh, 1
        )

    def _gather(
        self,
        name: str,
        digits: Sequence[Digit],
        buffer: Buffer,
        message_format: Format,
        times: int,
    ) -> Iterator[Flow]:
        """Yield `times` gathers along digits, which begin with the last hop."""
        hops = [hop for digit in digits for hop in self.factors.hops(digit)]
        if not hops:
            return
        element_bytes = FP32_BYTES if name == "reduce_states" else self.params_bytes
        first, last = hops[0].low, hops[-1].high
        if buffer.cut.bounds and digits != ("replica",):
            for hop in reversed(hops):
                to_each_bytes = times * buffer.length(hop.high) * element_bytes
                yield Flow(name, hop, to_each_bytes * (hop.width - 1), pairs=True)
            return
        part_bytes: float = buffer.length(last) * element_bytes
        if not message_format.is_lossless(element_bytes):
            part_bytes = self._slot_bytes(buffer, message_format, first, last)
        for hop in reversed(hops):
            sent_bytes = times * gather_bytes(part_bytes * (last // hop.low), hop.width)
            yield Flow(name, hop, sent_bytes, self.pairs)

    def _scatter(self, name: str, hop: Hop, buffer: Buffer, times: int) -> Flow:
        """Return a reduce-scatter, which is a ring only in fp32 (primitives.ReduceScatter)."""
        formats = self.formats.sums if hop.digit == "replica" else self.formats.grads
        message_format = formats.at(self._level(hop, buffer))
        if message_format.is_quantised:
            slot_bytes = self._slot_bytes(buffer, message_format, hop.low, hop.high)
            return Flow(name, hop, times * slot_bytes * (hop.width - 1), pairs=True)
        element_bytes = times * message_format.element_bytes
        if hop.digit == "replica" or not buffer.cut.bounds:
            sent_bytes = gather_bytes(buffer.length(hop.low) * element_bytes, hop.width)
            return Flow(name, hop, sent_bytes, self.pairs or message_format.bits < FP32.bits)
        parts = pairwise(buffer.cut.parts(buffer.data_rank, hop.low, hop.high))
        to_each = tuple((end - start) * element_bytes for start, end in parts)
        own = buffer.length(hop.high) * element_bytes
        return Flow(name, hop, sum(to_each) - own, pairs=True, to_each=to_each)

    def _sums(self, buffer: Buffer) -> Iterator[Flow]:
        whole, hops = self.factors.whole("replica"), self.factors.hops("replica")
        if not self.factors.divides_sums:
            total_bytes = buffer.length(whole.low) * FP32_BYTES
            yield Flow("reduce_states", whole, all_reduce_bytes(total_bytes, whole.width))
        elif hops:
            for hop in hops:
                yield self._scatter("reduce_states", hop, buffer, 1)
            message_format = self.formats.sums.at(self._level(hops[-1], buffer))
            yield from self._gather("reduce_states", ("replica",), buffer, message_format, 1)

    def _slot_bytes(self, buffer: Buffer, message_format: Format, whole: int, parts: int) -> int:
        """Return the bytes of a message.

        Before a reduce-scatter, or after a gather, the buffer is divided over `whole` ranks, and
        on the other side over `parts` ranks.
        """
        interval = buffer.cut.interval(buffer.data_rank, whole)
        border = max(0, min(buffer.border - interval.start, interval.length))
        return message_format.slot_bytes(buffer.length(parts), parts // whole, border)

    def _level(self, hop: Hop, buffer: Buffer) -> Level:
        return self.grid.farthest_level(self._group(hop, buffer.rank))

    def _group(self, hop: Hop, rank: int) -> tuple[int, ...]:
        ranks = self.grid.data_group(rank)
        data_ranks = hop.group(self.grid.coordinates(rank).data)
        return tuple(ranks[data_rank] for data_rank in data_ranks)
