"""Bytes that ranks send of their model states in a step, inside nodes and between nodes.

For a unit of n elements, factors p | g | o | D and M micro-batches per step, a rank takes part in

    gather_params   2M x  all-gather n along params (before the unit's forward, before its backward;
                          less often if it stays gathered in between: unit_gathers.count_gathers)
    reduce_grads     M x  reduce-scatter n along params, n/p along grads; nothing if g = 1
    reduce_states    1 x  reduce-scatter n/g along optimizer, all-reduce n/o along replica
    refresh_params   1 x  all-gather n/g along optimizer, then n/p along grads

A flow over one rank sends nothing. Volumes are those of rings (wire.py). If gathers and scatters
are messages between all pairs (gloo), they are as many bytes over other links. Parameters,
scattered gradients and the sums over replicas each have their own format. With `formats`,
quantised messages are counted as slots (formats.py), including scales and padding.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.geometry.formats import Format, StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Digit, Factors
from frontier_llm.geometry.wire import Sent, all_reduce_bytes, gather_bytes, pairs_sent, ring_sent


class Gathers(NamedTuple):
    """Number of times a unit is gathered in a step, before forward and before backward passes."""

    forward: int
    backward: int


class Flow(NamedTuple):
    """The bytes a rank sends of a unit in a step along one digit."""

    name: str
    """Name of the collective."""
    digit: Digit
    sent_bytes: float


class Cut(NamedTuple):
    """A buffer that is cut into parts for one flow."""

    parts: int
    elements: int
    """Elements of one part."""
    border: int
    """Number of elements at the start of the buffer that may be quantised."""


@dataclass(frozen=True)
class StateTraffic:
    """Counts the bytes that ranks send of their model states in one step."""

    grid: Grid
    factors: Factors
    micro_batches: int
    """Micro-batches of a replica per step."""
    params_bytes: float
    """Bytes per element of the parameters in gathers and in the refresh."""
    grads_bytes: float = 4.0
    """Bytes per element of the gradients in reduce-scatters."""
    sums_bytes: float = 4.0
    """Bytes per element of the gradients' sums in the all-reduce over replicas."""
    gathers_per_micro_batch: int = 2
    """2 = forward and backward; 1 = parameters stay gathered between the two."""
    pairs: bool = False
    """Whether gathers and scatters are messages between all pairs of a group, not rings."""
    formats: StateFormats | None = None
    """Number formats of all flows. If given, `params_bytes` is that of the compute format, and
    `grads_bytes` is not used."""

    def unit(
        self,
        rank: int,
        elements: int,
        gathers: int | Gathers | None = None,
        decayed: int | None = None,
    ) -> dict[str, Sent]:
        """Return what a rank sends for one unit, by collective; silent collectives are absent.

        Args:
            rank: of the grid.
            elements: size of the unit's buffer, padding included.
            gathers: number of gathers of this unit per step; None = `gathers_per_micro_batch`.
            decayed: elements before the norms and biases (FlatLayout); None = all.
        """
        if gathers is None:
            gathers = self.micro_batches * self.gathers_per_micro_batch
        if isinstance(gathers, int):
            gathers = Gathers(gathers - gathers // 2, gathers // 2)
        border = elements if decayed is None else decayed
        sent: defaultdict[str, Sent] = defaultdict(Sent)
        position = self.grid.coordinates(rank).data
        for name, digit, sent_bytes in self._flows(rank, elements, gathers, border):
            if sent_bytes:
                # sums over replicas are always rings, slots of gradients always pairs
                attribute = pairs_sent if self._in_pairs(name, digit, rank) else ring_sent
                group = self._group(digit, rank, position)
                sent[name] += attribute(self.grid, rank, group, sent_bytes)
        return dict(sent)

    def rank(self, rank: int, units: Sequence[int]) -> dict[str, Sent]:
        """Return what a rank sends for units of these sizes, by collective."""
        if self.formats is None:
            return self.unit(rank, sum(units))  # every flow is linear in n
        together: defaultdict[str, Sent] = defaultdict(Sent)
        for elements in units:
            for name, sent in self.unit(rank, elements).items():
                together[name] += sent
        return dict(together)

    def _flows(self, rank: int, elements: int, gathers: Gathers, border: int) -> Iterator[Flow]:
        factors, times = self.factors, self.micro_batches
        position = self.grid.coordinates(rank).data
        params = factors.params_interval(elements, position)
        grads = factors.grads_interval(elements, position)
        own = elements // factors.optimizer
        in_params = max(0, min(border - params.start, params.length))
        in_grads = max(0, min(border - grads.start, grads.length))
        over_params = Cut(factors.params, params.length, border)
        over_grads = Cut(factors.width("grads"), grads.length, in_params)
        over_optimizer = Cut(factors.width("optimizer"), own, in_grads)
        formats = self.formats or StateFormats()
        yield self._gather("params", over_params, gathers.forward, formats.params)
        yield self._gather("params", over_params, gathers.backward, formats.params_backward)
        yield self._scatter("reduce_grads", "params", over_params, times, rank)
        yield self._scatter("reduce_grads", "grads", over_grads, times, rank)
        yield self._scatter("reduce_states", "optimizer", over_optimizer, 1, rank)
        sums = all_reduce_bytes(own * self.sums_bytes, factors.width("replica"))
        yield Flow("reduce_states", "replica", sums)
        refreshed = Cut(over_grads.parts * over_optimizer.parts, own, in_params)
        yield from self._refresh(refreshed, formats.refresh)

    def _gather(self, digit: Digit, cut: Cut, times: int, code: Format) -> Flow:
        if self.formats is None or code.is_lossless(round(self.params_bytes)):
            whole = cut.parts * cut.elements * self.params_bytes
            return Flow("gather_params", digit, times * gather_bytes(whole, cut.parts))
        slot = code.slot_bytes(cut.elements, cut.parts, cut.border)
        return Flow("gather_params", digit, times * slot * (cut.parts - 1))

    def _scatter(self, name: str, digit: Digit, cut: Cut, times: int, rank: int) -> Flow:
        code = self._scatter_format(digit, rank)
        if code is not None and code.is_quantised:
            slot = code.slot_bytes(cut.elements, cut.parts, cut.border)
            return Flow(name, digit, times * slot * (cut.parts - 1))
        width = self.grads_bytes if code is None else code.element_bytes
        whole = cut.parts * cut.elements * width
        return Flow(name, digit, times * gather_bytes(whole, cut.parts))

    def _refresh(self, cut: Cut, code: Format) -> Iterator[Flow]:
        """Gather along `optimizer`, then along `grads` the intervals that this produced."""
        grads_width, optimizer_width = self.factors.width("grads"), self.factors.width("optimizer")
        part = cut.elements * self.params_bytes
        if self.formats is not None and not code.is_lossless(round(self.params_bytes)):
            part = code.slot_bytes(cut.elements, cut.parts, cut.border)
        run = part * optimizer_width
        yield Flow("refresh_params", "optimizer", gather_bytes(run, optimizer_width))
        yield Flow("refresh_params", "grads", gather_bytes(run * grads_width, grads_width))

    def _scatter_format(self, digit: Digit, rank: int) -> Format | None:
        if self.formats is None:
            return None
        group = self._group(digit, rank, self.grid.coordinates(rank).data)
        return self.formats.grads_over([self.grid.node(member) for member in group])

    def _in_pairs(self, name: str, digit: Digit, rank: int) -> bool:
        """Whether a flow is messages between all pairs; quantised scatters always are."""
        if digit == "replica":
            return False
        code = self._scatter_format(digit, rank) if name.startswith("reduce") else None
        return self.pairs or (code is not None and code.is_quantised)

    def _group(self, digit: Digit, rank: int, position: int) -> list[int]:
        ranks = self.grid.data_group(rank)
        return [ranks[member] for member in self.factors.group(digit, position)]
