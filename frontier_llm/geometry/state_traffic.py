"""Bytes on the wire of the model states: what each flow of the partition sends, over which links.

For a unit of n elements, factors p | g | o | D and M micro-batches a step, a rank takes part in

    gather_params   2M x  all-gather n over a (before the unit's forward, before its backward)
    reduce_grads     M x  reduce-scatter n over a, then n/p over b; nothing if g = 1
    reduce_states    1 x  reduce-scatter n/g over c, then all-reduce n/o over d
    refresh_params   1 x  all-gather n/g over c, then n/p over b

where a flow over one rank sends nothing. Volumes are those of rings (`wire`), or, where gathers and
scatters are messages between all pairs (gloo), as many bytes over other links. Parameters, what is
scattered of gradients, and their sums over replicas travel in formats of their own.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Digit, Factors
from frontier_llm.geometry.wire import Sent, all_reduce_bytes, gather_bytes, pairs_sent, ring_sent

Flow = tuple[str, Digit, float]
"""Name of the collective, digit it runs along, bytes a rank sends in a step."""


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

    def unit(self, rank: int, elements: int, gathers: int | None = None) -> dict[str, Sent]:
        """Return what a rank sends for one unit, by collective; what sends nothing is absent.

        Args:
            rank: of the grid.
            elements: of the unit's buffer, padding included.
            gathers: of this unit in a step; absent = the same in each micro-batch.
        """
        if gathers is None:
            gathers = self.micro_batches * self.gathers_per_micro_batch
        sent: defaultdict[str, Sent] = defaultdict(Sent)
        ranks = self.grid.data_group(rank)
        position = self.grid.coordinates(rank).data
        for name, digit, sent_bytes in self._flows(elements, gathers):
            if sent_bytes:
                group = [ranks[member] for member in self.factors.group(digit, position)]
                # sums over replicas are rings everywhere
                attribute = pairs_sent if self.pairs and digit != "d" else ring_sent
                sent[name] += attribute(self.grid, rank, group, sent_bytes)
        return dict(sent)

    def rank(self, rank: int, units: Sequence[int]) -> dict[str, Sent]:
        """Return what a rank sends for all its units, by collective; arguments as above."""
        return self.unit(rank, sum(units))  # every flow is linear in n

    def _flows(self, elements: int, gathers: int) -> Iterator[Flow]:
        factors, times = self.factors, self.micro_batches
        whole, of_params = elements, elements / factors.params
        of_grads, of_optimizer = elements / factors.grads, elements / factors.optimizer
        yield self._gather("gather_params", "a", gathers * whole * self.params_bytes)
        yield self._gather("reduce_grads", "a", times * whole * self.grads_bytes)
        yield self._gather("reduce_grads", "b", times * of_params * self.grads_bytes)
        yield self._gather("reduce_states", "c", of_grads * self.grads_bytes)
        sums = all_reduce_bytes(of_optimizer * self.sums_bytes, factors.width("d"))
        yield "reduce_states", "d", sums
        yield self._gather("refresh_params", "c", of_grads * self.params_bytes)
        yield self._gather("refresh_params", "b", of_params * self.params_bytes)

    def _gather(self, name: str, digit: Digit, total_bytes: float) -> Flow:
        """Describe an all-gather, or the reduce-scatter that is its mirror."""
        return name, digit, gather_bytes(total_bytes, self.factors.width(digit))
