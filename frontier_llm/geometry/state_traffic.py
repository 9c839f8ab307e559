"""Bytes on the wire of the model states: what each flow of the partition sends, over which links.

For a unit of n elements, factors p | g | o | D and M micro-batches a step, a rank takes part in

    gather_params   2M x  all-gather n over a (before the unit's forward, before its backward; less
                          often where it stays whole in between: units.gathers_by_pass)
    reduce_grads     M x  reduce-scatter n over a, then n/p over b; nothing if g = 1
    reduce_states    1 x  reduce-scatter n/g over c, then all-reduce n/o over d
    refresh_params   1 x  all-gather n/g over c, then n/p over b

where a flow over one rank sends nothing. Volumes are those of rings (`wire`), or, where gathers and
scatters are messages between all pairs (gloo), as many bytes over other links. Parameters, what is
scattered of gradients, and their sums over replicas travel in formats of their own. With
`formats` those that need it travel in slots (formats.py), scales and padding included.
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
    """How often a unit is gathered in a step."""

    forward: int
    backward: int


class Flow(NamedTuple):
    """What a rank sends of a unit in a step along one digit."""

    name: str
    """Of the collective."""
    digit: Digit
    sent_bytes: float


class Cut(NamedTuple):
    """A buffer that is cut into parts for one flow."""

    parts: int
    elements: int
    """Of a part."""
    border: int
    """Elements before it may be quantised."""


@dataclass(frozen=True)
class StateTraffic:
    """What ranks send of their model states in one step."""

    grid: Grid
    factors: Factors
    micro_batches: int
    """A replica's, in a step."""
    params_bytes: float
    """Of an element of the parameters, as gathers and the refresh send it."""
    grads_bytes: float = 4.0
    """Of an element of the gradients, as reduce-scatters send it."""
    sums_bytes: float = 4.0
    """Of an element of the gradients' sums, as the all-reduce over replicas sends it."""
    gathers_per_micro_batch: int = 2
    """Forward and backward; 1 where the parameters stay from the one to the other."""
    pairs: bool = False
    """Whether gathers and scatters are messages between all pairs of a group, not rings."""
    formats: StateFormats | None = None
    """How states travel; then `params_bytes` is that of the compute format, and `grads_bytes` does
    not matter."""

    def unit(
        self,
        rank: int,
        elements: int,
        gathers: int | Gathers | None = None,
        decayed: int | None = None,
    ) -> dict[str, Sent]:
        """Return what a rank sends for one unit, by collective; what sends nothing is absent.

        Args:
            rank: of the grid.
            elements: of the unit's buffer, padding included.
            gathers: of this unit in a step; absent = the same in each micro-batch.
            decayed: elements before the norms and biases (FlatLayout); absent = there are none.
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
                # sums over replicas and slots of gradients go their own way everywhere
                attribute = pairs_sent if self._in_pairs(name, digit, rank) else ring_sent
                group = self._group(digit, rank, position)
                sent[name] += attribute(self.grid, rank, group, sent_bytes)
        return dict(sent)

    def rank(self, rank: int, units: Sequence[int]) -> dict[str, Sent]:
        """Return what a rank sends for units of so many elements, by collective."""
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
        over_a = Cut(factors.params, params.length, border)
        over_b = Cut(factors.width("b"), grads.length, in_params)
        over_c = Cut(factors.width("c"), own, in_grads)
        formats = self.formats or StateFormats()
        yield self._gather("a", over_a, gathers.forward, formats.params)
        yield self._gather("a", over_a, gathers.backward, formats.params_backward)
        yield self._scatter("reduce_grads", "a", over_a, times, rank)
        yield self._scatter("reduce_grads", "b", over_b, times, rank)
        yield self._scatter("reduce_states", "c", over_c, 1, rank)
        sums = all_reduce_bytes(own * self.sums_bytes, factors.width("d"))
        yield Flow("reduce_states", "d", sums)
        yield from self._refresh(Cut(over_b.parts * over_c.parts, own, in_params), formats.refresh)

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
        """Gather over c, then over b what that brought."""
        width_b, width_c = self.factors.width("b"), self.factors.width("c")
        part = cut.elements * self.params_bytes
        if self.formats is not None and not code.is_lossless(round(self.params_bytes)):
            part = code.slot_bytes(cut.elements, cut.parts, cut.border)
        run = part * width_c
        yield Flow("refresh_params", "c", gather_bytes(run, width_c))
        yield Flow("refresh_params", "b", gather_bytes(run * width_b, width_b))

    def _scatter_format(self, digit: Digit, rank: int) -> Format | None:
        if self.formats is None:
            return None
        group = self._group(digit, rank, self.grid.coordinates(rank).data)
        return self.formats.grads_over([self.grid.node(member) for member in group])

    def _in_pairs(self, name: str, digit: Digit, rank: int) -> bool:
        """Whether a flow is messages between all pairs; quantised scatters are so everywhere."""
        if digit == "d":
            return False
        code = self._scatter_format(digit, rank) if name.startswith("reduce") else None
        return self.pairs or (code is not None and code.is_quantised)

    def _group(self, digit: Digit, rank: int, position: int) -> list[int]:
        ranks = self.grid.data_group(rank)
        return [ranks[member] for member in self.factors.group(digit, position)]
