"""Parameters: whole while they are used, cut in between, refreshed after the update.

A unit's parameters are in one of these states:

    stale      the update wrote this rank's optimizer interval; the refresh waits or is under way
    cut        the shard is up to date; the whole buffer has no memory
    gathering  memory is there, the other ranks' shards are arriving
    whole      modules may read

`acquire` takes a unit from any of them to `whole`; `release` back to `cut`. Uncut units
(factor 1) are only ever stale or whole.

The order in which units are acquired in one step is the order of the next: it is recorded, and
each acquire and release starts the gathers of those that will follow, of large units so many that
`units_in_flight` are whole or on their way (geometry/state_memory.in_flight). A unit stays whole
after its use where it is one of these, and where its backward pass waits for another use of it (a
table that is the head's too).

What is read is derived from the master weights, so it has their version: a unit whose masters were
changed by anything but an update or an adoption is refused (versions.py).
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from frontier_llm.collectives.chain import Chain
from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.formats import FP32
from frontier_llm.geometry.state_memory import in_flight, small_elements
from frontier_llm.sharding.groups import StateGroups
from frontier_llm.sharding.unit import Unit
from frontier_llm.sharding.versions import Versions


class Use(NamedTuple):
    """What a unit is acquired for."""

    unit: Unit
    backward: bool


class Parameters:
    """The parameters of all units of a rank.

    Every rank acquires and releases in the same order: each acquire may be a collective.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: StateGroups,
        transport: Transport,
        units_in_flight: int,
        versions: Versions,
    ) -> None:
        self._units, self._groups, self._transport = units, groups, transport
        self._units_in_flight, self._versions = units_in_flight, versions
        small = small_elements(Counter(unit.layout.size for unit in units)) if units else 0
        self._small = {unit for unit in units if unit.layout.size <= small}
        self._to_refresh: deque[Unit] = deque()
        self._refreshes: dict[Unit, Chain] = {}
        self._refresh_format = transport.formats.refresh
        self._gathers: dict[Unit, Chain] = {}
        self._whole: set[Unit] = set()
        self._plan: list[Use] = []
        self._seen: list[Use] = []
        self._reading: list[Use] = []  # the last one acquired, until it is released
        self._in_step = False
        self.peak_gathered_bytes = 0
        """Most memory that gathered parameters held at once, over the run."""

    def begin_step(self) -> None:
        """Start a step: the order of the one before is what is expected now."""
        self._plan, self._seen, self._in_step = self._seen, [], True

    def end_step(self) -> None:
        """Cut everything: what stayed whole would be stale after the update."""
        self._in_step, self._reading = False, []
        for unit in list(self._gathers):
            self._gathers.pop(unit).wait()
            self._whole.add(unit)
        for unit in self._whole:
            unit.release()
        self._whole.clear()

    def acquire(self, unit: Unit, *, backward: bool = False) -> None:
        """Make a unit's parameters whole and up to date.

        Collective over the ranks that hold its parts; blocks.

        Args:
            unit: whose.
            backward: whether a backward pass reads them.

        Raises:
            TrainingError: its master weights were changed, and the parameters were not.
        """
        self._finish_refresh(unit)
        self._versions.check(unit)
        if not unit.is_cut:
            return
        use = Use(unit, backward)
        if unit not in self._whole:
            if unit not in self._gathers:
                self._start_gather(use)
            self._gathers.pop(unit).wait()
            self._whole.add(unit)
        if self._in_step:
            self._seen.append(use)
            self._reading = [use]
            self._gather(self._ahead())

    def release(self, unit: Unit) -> None:
        """Free a unit's whole parameters, unless they would be gathered again at once."""
        self._reading = [use for use in self._reading if use.unit is not unit]
        if unit not in self._whole:
            return
        ahead = list(self._ahead())
        if all(use.unit is not unit for use in ahead):
            self._whole.remove(unit)
            unit.release()
        self._gather(ahead)  # there is room now

    def refresh(self) -> None:
        """Start to bring every rank's shards up to date with the updated optimizer intervals.

        Collective; returns at once, `acquire` and `settle` wait. Encoded, as many units as may be
        in flight twice begin at once, and the next as those are waited for: their messages need
        memory. As they are, all begin.
        """
        self._refresh_format = self._transport.formats.refresh
        self._to_refresh = deque(unit for unit in self._units if unit.is_trainable)
        for unit in self._to_refresh:
            self._versions.made(unit)
        self._start_refreshes()

    def gather_first(self) -> None:
        """Gather what the next step begins with while nobody computes, if nothing is in the way."""
        if self._groups.b is None and self._groups.c is None:
            self._gather(self._in_flight(self._seen))

    def settle(self) -> None:
        """Wait until every shard is up to date."""
        for unit in self._units:
            self._finish_refresh(unit)

    def drain(self) -> None:
        """Wait until nothing is under way; what is gathered stays."""
        self.settle()
        for gather in self._gathers.values():
            gather.wait()

    def exact(self, unit: Unit, master: torch.Tensor | None) -> torch.Tensor:
        """Gather a unit as it is, past what training reads and without touching it.

        Collective over the ranks that hold its parts; blocks.

        Args:
            unit: whose.
            master: [n / o] fp32, this rank's master weights; None = it is frozen.

        Returns:
            [n] compute dtype, a new buffer.
        """
        whole = torch.empty(
            unit.layout.size, dtype=unit.whole.dtype, device=self._transport.pool.device
        )
        groups = self._groups
        if master is None:
            unit.part(whole, unit.params).copy_(unit.shard)
        else:
            unit.part(whole, unit.optimizer).copy_(master)
            held = unit.part(whole, unit.params)
            Chain(
                self._transport.gather(held, (groups.c, groups.b), FP32, 0, "refresh_params")
            ).wait()
        Chain(self._transport.gather(whole, (groups.a,), FP32, 0, "gather_params")).wait()
        return whole

    def _start_refreshes(self) -> None:
        is_lossless = self._refresh_format.is_lossless(self._transport.compute_dtype.itemsize)
        limit = len(self._units) if is_lossless else 2 * self._units_in_flight
        while self._to_refresh and len(self._refreshes) < limit:
            self._start_refresh(self._to_refresh.popleft())

    def _start_refresh(self, unit: Unit) -> None:
        hops = (self._groups.c, self._groups.b)
        border = unit.quantised_border(unit.params)
        code = self._refresh_format
        self._refreshes[unit] = Chain(
            self._transport.gather(unit.shard, hops, code, border, "refresh_params")
        )

    def _finish_refresh(self, unit: Unit) -> None:
        while unit in self._to_refresh:  # in order, as on every rank
            self._start_refresh(self._to_refresh.popleft())
        chain = self._refreshes.pop(unit, None)
        if chain is not None:
            chain.wait()
            self._start_refreshes()

    def _start_gather(self, use: Use) -> None:
        unit = use.unit
        formats = self._transport.formats
        code = formats.params_backward if use.backward else formats.params
        whole = unit.materialise()
        border = unit.quantised_border()
        self._gathers[unit] = Chain(
            self._transport.gather(whole, (self._groups.a,), code, border, "gather_params")
        )
        held = sum(u.whole_bytes for u in (*self._whole, *self._gathers))
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, held)

    def _expected(self) -> Iterator[Use]:
        """Yield what will be acquired, if this step still follows the plan."""
        position = len(self._seen)
        if self._in_step and (not position or self._seen[-1] == self._plan_at(position - 1)):
            # islice would walk there from the start, at each unit
            yield from map(self._plan.__getitem__, range(position, len(self._plan)))

    def _plan_at(self, position: int) -> Use | None:
        return self._plan[position] if position < len(self._plan) else None

    def _ahead(self) -> Iterator[Use]:
        """Yield what is to be whole or on its way now; outside of steps nothing."""
        return self._in_flight(chain(self._reading, self._expected()))

    def _in_flight(self, uses: Iterable[Use]) -> Iterator[Use]:
        return (Use(*use) for use in in_flight(uses, self._small, self._units_in_flight))

    def _gather(self, uses: Iterable[Use]) -> None:
        """Start the gathers of those that are not yet there."""
        for use in uses:
            if use.unit not in self._whole and use.unit not in self._gathers:
                self._finish_refresh(use.unit)
                self._start_gather(use)
