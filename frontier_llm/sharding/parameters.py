"""Parameters: whole while they are used, cut in between, refreshed after the update.

A unit's parameters are in one of these states:

    stale      the update wrote this rank's optimizer interval; the refresh is under way
    cut        the shard is up to date; the whole buffer has no memory
    gathering  memory is there, the other ranks' shards are arriving
    whole      modules may read

`acquire` takes a unit from any of them to `whole`; `release` back to `cut`. Uncut units
(factor 1) are only ever stale or whole.

The order in which units are acquired in one step is the order of the next: it is recorded, and
each acquire starts the gather of the unit that will follow.
"""

from collections.abc import Sequence

from frontier_llm.collectives.chain import Chain, Steps
from frontier_llm.collectives.gather import all_gather
from frontier_llm.collectives.handle import Handle
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.sharding.groups import StateGroups
from frontier_llm.sharding.unit import Unit


class Parameters:
    """The parameters of all units of a rank.

    Every rank acquires and releases in the same order: each acquire may be a collective.
    """

    def __init__(
        self, units: Sequence[Unit], groups: StateGroups, traffic: Traffic, units_in_flight: int
    ) -> None:
        self._units, self._groups, self._traffic = units, groups, traffic
        self._units_in_flight = units_in_flight
        self._refreshes: dict[Unit, Chain] = {}
        self._gathers: dict[Unit, Handle] = {}
        self._whole: set[Unit] = set()
        self._plan: list[Unit] = []
        self._seen: list[Unit] = []
        self._in_step = False
        self.peak_gathered_bytes = 0
        """Most memory that gathered parameters held at once, over the run."""

    def begin_step(self) -> None:
        """Start a step: the order of the one before is what is expected now."""
        self._plan, self._seen, self._in_step = self._seen, [], True

    def end_step(self) -> None:
        """Cut everything: what stayed whole would be stale after the update."""
        self._in_step = False
        for unit in list(self._gathers):
            self._gathers.pop(unit).wait()
            self._whole.add(unit)
        for unit in self._whole:
            unit.release()
        self._whole.clear()

    def acquire(self, unit: Unit) -> None:
        """Make a unit's parameters whole and up to date.

        Collective over the ranks that hold its parts; blocks.
        """
        self._finish_refresh(unit)
        if not unit.is_cut:
            return
        if unit not in self._whole:
            self._start_gather(unit)
            self._gathers.pop(unit).wait()
            self._whole.add(unit)
        if self._in_step:
            self._seen.append(unit)
            self._prefetch()

    def release(self, unit: Unit) -> None:
        """Free a unit's whole parameters, unless they are the next to be acquired."""
        if unit in self._whole and self._expected() is not unit:
            self._whole.remove(unit)
            unit.release()

    def refresh(self) -> None:
        """Start to bring every rank's shards up to date with the updated optimizer intervals.

        Collective; returns at once, `acquire` and `settle` wait.
        """
        for unit in self._units:
            if unit.is_trainable:
                self._refreshes[unit] = Chain(self._refresh_steps(unit))
        if self._groups.b is None and self._groups.c is None:
            # nothing to wait for: gather what the next step begins with while nobody computes
            for unit in dict.fromkeys(self._seen[: self._units_in_flight]):
                self._finish_refresh(unit)
                self._start_gather(unit)

    def settle(self) -> None:
        """Wait until every shard is up to date."""
        for unit in self._units:
            self._finish_refresh(unit)

    def _refresh_steps(self, unit: Unit) -> Steps:
        yield all_gather(
            unit.shard_part(unit.grads), self._groups.c, self._traffic, "refresh_params"
        )
        yield all_gather(unit.shard, self._groups.b, self._traffic, "refresh_params")

    def _finish_refresh(self, unit: Unit) -> None:
        chain = self._refreshes.pop(unit, None)
        if chain is not None:
            chain.wait()

    def _start_gather(self, unit: Unit) -> None:
        if unit in self._gathers:
            return
        whole = unit.materialise()
        self._gathers[unit] = all_gather(whole, self._groups.a, self._traffic, "gather_params")
        held = sum(u.whole_bytes for u in (*self._whole, *self._gathers))
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, held)

    def _expected(self) -> Unit | None:
        """Return the unit that will be acquired next, if this step still follows the plan."""
        position = len(self._seen)
        follows = self._in_step and position < len(self._plan)
        if not follows or (position and self._seen[-1] is not self._plan[position - 1]):
            return None
        return self._plan[position]

    def _prefetch(self) -> None:
        unit = self._expected()
        if unit is None or unit in self._whole or unit in self._gathers:
            return
        if len(self._whole) + len(self._gathers) < self._units_in_flight:
            self._finish_refresh(unit)
            self._start_gather(unit)
