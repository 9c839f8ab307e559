"""Parameters of all units: gathered while modules read them, sharded otherwise.

States of a unit:

    stale      the update wrote this rank's optimizer interval; the refresh, which copies the
               updated intervals of other ranks into this rank's shard, has not finished
    sharded    the shard is up to date; the buffer has no memory
    gathering  the buffer has memory; the other ranks' shards are arriving
    gathered   modules may read the parameters

`acquire` takes a unit from any state to `gathered`, `release` back to `sharded`. Units that are not
sharded (every rank holds all their parameters) are only ever stale or gathered. Parameters of a
unit that is not gathered are guarded (sharding/guarded.py): a read calls `Parameters.before_read`.

The order in which units are acquired in a step is recorded and expected in the next step. Every
acquire and release determines a window: the unit that is read and the units expected next, up to
`units_in_flight` large units (geometry/state_memory.prefetch_window). Units in the window are
gathered ahead, and a unit that is released stays gathered if it is in the window. During a backward
pass the previous unit may still be gathered outside the window, until its last gradient arrives.

In shapes, n is the number of elements of a unit's buffer, and o the number of ranks over which its
optimizer states are divided.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from frontier_llm.collectives.handles import Chain
from frontier_llm.collectives.transport import Transport
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.formats import FP32, Format
from frontier_llm.geometry.state_memory import prefetch_window, small_elements
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.guarded import in_backward
from frontier_llm.sharding.unit import StateGroups, Unit


class Use(NamedTuple):
    """One acquire of a unit."""

    unit: Unit
    backward: bool
    """Whether a backward pass reads the parameters."""


class Parameters:
    """The parameters of all units of a rank.

    Every rank must acquire and release in the same order: each acquire may be a collective. At
    first all units are sharded and up to date.

    Attributes:
        peak_gathered_bytes: the most memory that gathered parameters held at once.
        uses: the acquires of sharded units in this step so far.
        reads_together: whether all ranks are reading parameters in the same order now, so that a
            read may start collectives. By default they never do.
    """

    def __init__(
        self, units: Sequence[Unit], groups: StateGroups, transport: Transport, units_in_flight: int
    ) -> None:
        self._units, self._transport = units, transport
        self._params_groups = groups.along("params")[::-1]
        self._refresh_groups = groups.along("grads", "optimizer")[::-1]
        self._units_in_flight = units_in_flight
        small = small_elements(Counter(unit.layout.size for unit in units)) if units else 0
        self._small = {unit for unit in units if unit.layout.size <= small}
        self._masters: dict[Unit, torch.Tensor] = {}
        self._master_versions: dict[Unit, int] = {}
        self._to_refresh: deque[Unit] = deque()
        self._refreshes: dict[Unit, Chain] = {}
        self._refresh_format, self._refresh_differences = transport.formats.refresh, False
        self._gathers: dict[Unit, Chain] = {}
        self._gathered: set[Unit] = set()
        self._expected: list[Use] = []  # the previous step's uses
        self.uses: list[Use] = []
        self._current: list[Use] = []  # the last use, until it is released
        self._in_step = False
        self.peak_gathered_bytes = 0
        self.reads_together: Callable[[], bool] = lambda: False
        for unit in units:
            unit.guard_with(partial(self.before_read, unit))
            if unit.is_sharded:
                unit.guard()

    def set_masters(self, masters: Mapping[Unit, torch.Tensor]) -> None:
        """Take the master weights, [n / o] fp32, from which trainable units are refreshed."""
        self._masters = dict(masters)
        self._store_master_versions()

    def begin_step(self) -> None:
        """Start a step. Prefetching follows the previous step's acquire order."""
        self._expected, self.uses, self._in_step = self.uses, [], True

    def end_step(self) -> None:
        """Release all units, since the update makes gathered parameters stale."""
        self._in_step, self._current = False, []
        for unit in list(self._gathers):
            self._gathers.pop(unit).wait()
            self._gathered.add(unit)
        for unit in self._gathered:
            unit.release()
        self._gathered.clear()

    def acquire(self, unit: Unit, *, backward: bool = False) -> None:
        """Gather a unit's up-to-date parameters, and prefetch the units expected next.

        Collective over the ranks that hold its parts; blocks. `backward` tells that a backward pass
        reads the parameters, whose gathers may have another format. Raises TrainingError if the
        master weights were written to after the parameters.
        """
        self._finish_refresh(unit)
        self._check_master_version(unit)
        if not unit.is_sharded:
            return
        use = Use(unit, backward)
        if unit not in self._gathered:
            if unit not in self._gathers:
                self._start_gather(use)
            self._gathers.pop(unit).wait()
            self._gathered.add(unit)
            unit.unguard()
        if self._in_step:
            self.uses.append(use)
            self._current = [use]
            self._prefetch(self._wanted())

    def release(self, unit: Unit) -> None:
        """Free a unit's gathered parameters, unless the unit is expected again in the window."""
        self._current = [use for use in self._current if use.unit is not unit]
        if unit not in self._gathered:
            return
        wanted = list(self._wanted())
        if all(use.unit is not unit for use in wanted):
            self._gathered.remove(unit)
            unit.release()
        self._prefetch(wanted)

    def before_read(self, unit: Unit, record: ParameterRecord) -> None:
        """Make the parameters of a unit available before one of them is read outside its module.

        Collective over the ranks that hold its parts, unless its refresh only has to be waited for.
        """
        together = self.reads_together()
        ends_alone = not unit.is_sharded and len(self._refresh_groups) <= 1 and not self._to_refresh
        if not together and not ends_alone:
            raise TrainingError(
                f"{record.name} is read outside of a forward and backward pass, and its values are "
                "on other ranks\n  do: read it in `with states.gathered():`, or call "
                "states.state_dict(), on all ranks"
            )
        self.make_readable(unit)

    @property
    def is_gathered(self) -> bool:
        """Whether all units are in memory in full."""
        return all(unit in self._gathered for unit in self._units if unit.is_sharded)

    def make_readable(self, unit: Unit) -> None:
        """Gather a unit's parameters, if they are not gathered."""
        if unit not in self._gathered:
            self.acquire(unit, backward=in_backward())

    def note_masters(self, unit: Unit) -> None:
        """Note that the master weights and the parameters of a unit were written.

        torch counts the writes to a tensor. So `acquire` notices masters that were written to
        without a refresh.
        """
        self._master_versions[unit] = self._masters[unit]._version

    def refresh(self, *, differences: bool = False) -> None:
        """Start to send the updated optimizer intervals to all ranks that store them.

        Collective; returns at once, and `acquire` and `settle` wait for the result. In a lossless
        format the refreshes of all units start now. Other formats need message buffers, so at most
        2 * `units_in_flight` refreshes are under way at once.

        With `differences`, the shards still hold the parameters that were last sent: each rank
        sends the difference of its master weights from them, which all ranks add to their shards.
        """
        formats = self._transport.formats
        self._refresh_differences = differences
        # a refresh that is full although the formats ask for differences follows a resume
        is_full = formats.refresh_differences and not differences
        self._refresh_format = FP32 if is_full else formats.refresh
        self._to_refresh = deque(unit for unit in self._units if unit.is_trainable)
        for unit in self._to_refresh if self._refresh_groups else ():
            unit.guard()
        self._store_master_versions()
        self._start_refreshes()

    def gather_first(self) -> None:
        """Prefetch the first units of the next step, if no refresh over ranks has to come first."""
        if not self._refresh_groups:
            self._prefetch(self._in_flight(self.uses))

    def settle(self) -> None:
        """Wait until every shard is up to date."""
        for unit in self._units:
            self._finish_refresh(unit)

    def drain(self) -> None:
        """Wait for all refreshes and gathers under way; gathered parameters stay allocated.

        Collective over the ranks that hold parts of the same parameters.
        """
        self.settle()
        for gather in self._gathers.values():
            gather.wait()

    def gather_exact(self, unit: Unit, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Gather a unit's master weights (its shards if it is frozen) without quantisation.

        Collective over the ranks that hold its parts; blocks. The unit's own buffer is not touched:
        the result is a new tensor [n], by default of the compute dtype.
        """
        device = self._transport.pool.device
        buffer = torch.empty(unit.layout.size, dtype=dtype or unit.buffer.dtype, device=device)
        master = self._masters.get(unit)
        if master is None:
            unit.part(buffer, unit.params_interval).copy_(unit.shard)
        else:
            unit.part(buffer, unit.optimizer_interval).copy_(master)
            self._refresh(unit, unit.part(buffer, unit.params_interval), FP32).wait()
        self._gather(unit, buffer, FP32).wait()
        return buffer

    def _refresh(
        self, unit: Unit, shard: torch.Tensor, fmt: Format, source: torch.Tensor | None = None
    ) -> Chain:
        groups, border = self._refresh_groups, unit.matrix_elements(unit.params_interval)
        bounds = unit.refresh_parts
        return Chain(
            self._transport.gather(
                shard, groups, fmt, border, "refresh_params", source=source, bounds=bounds
            )
        )

    def _gather(self, unit: Unit, buffer: torch.Tensor, fmt: Format) -> Chain:
        groups, border, bounds = self._params_groups, unit.layout.decayed, unit.params_parts
        return Chain(
            self._transport.gather(buffer, groups, fmt, border, "gather_params", bounds=bounds)
        )

    def _store_master_versions(self) -> None:
        for unit in self._masters:
            self.note_masters(unit)

    def _check_master_version(self, unit: Unit) -> None:
        master = self._masters.get(unit)
        if master is not None and master._version != self._master_versions[unit]:
            raise TrainingError(
                f"the master weights of {unit.name} were written to, but its parameters were not "
                "refreshed from them: call ShardedStates.adopt after writing to shards"
            )

    def _start_refreshes(self) -> None:
        is_lossless = self._refresh_format.is_lossless(self._transport.compute_dtype.itemsize)
        limit = len(self._units) if is_lossless else 2 * self._units_in_flight
        while self._to_refresh and len(self._refreshes) < limit:
            self._start_refresh(self._to_refresh.popleft())

    def _start_refresh(self, unit: Unit) -> None:
        source = self._masters[unit] if self._refresh_differences else None
        self._refreshes[unit] = self._refresh(unit, unit.shard, self._refresh_format, source)

    def _finish_refresh(self, unit: Unit) -> None:
        while unit in self._to_refresh:  # every rank must start refreshes in the same order
            self._start_refresh(self._to_refresh.popleft())
        while unit in self._refreshes:  # and end them, since a refresh may be several collectives
            earlier = next(iter(self._refreshes))
            self._refreshes.pop(earlier).wait()
            # in fp32 the master lies in the shard: a gather in place may count as a write to it
            self.note_masters(earlier)
            if not earlier.is_sharded:
                earlier.unguard()
            self._start_refreshes()

    def _start_gather(self, use: Use) -> None:
        unit, formats = use.unit, self._transport.formats
        fmt = formats.params_backward if use.backward else formats.params
        self._gathers[unit] = self._gather(unit, unit.materialise(), fmt)
        gathered_bytes = sum(unit.buffer_bytes for unit in (*self._gathered, *self._gathers))
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, gathered_bytes)

    def _expected_next(self) -> Iterator[Use]:
        """Yield the previous step's uses from this position on, if the last use is the same."""
        position = len(self.uses)
        if self._in_step and self._expected[max(0, position - 1) : position] == self.uses[-1:]:
            # not islice: it would walk from the start to `position` at each unit
            yield from map(self._expected.__getitem__, range(position, len(self._expected)))

    def _wanted(self) -> Iterator[Use]:
        """Yield the uses in the prefetch window; between steps there are none."""
        return self._in_flight(chain(self._current, self._expected_next()))

    def _in_flight(self, uses: Iterable[Use]) -> Iterator[Use]:
        """Yield the first uses, until `units_in_flight` large units are among them."""
        return (Use(*use) for use in prefetch_window(uses, self._small, self._units_in_flight))

    def _prefetch(self, uses: Iterable[Use]) -> None:
        for use in uses:
            if use.unit not in self._gathered and use.unit not in self._gathers:
                self._finish_refresh(use.unit)
                self._start_gather(use)
