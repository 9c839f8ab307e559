"""A process that can hold a rank of a job, and what it does when other processes die.

Under srun and torchrun without recovery, a process holds its rank in one generation
(`Membership`). Otherwise a coordinator publishes who holds which rank (`RosterMembership`).

States of such a member:

- waiting: no roster names it (a spare), or it waits for the next roster.
- working: it holds a rank of the newest generation.
- cut: a newer roster exists while it works. A thread shuts down its connections until the main
  thread has noticed and calls `leave`. It is then waiting again, with all that it has in memory.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from frontier_llm.errors import ConfigError, LaunchError, RankFailure, StopRequested, TrainingError
from frontier_llm.launch.coordination import wait_for_exit
from frontier_llm.launch.failure import is_lost_contact, is_timeout
from frontier_llm.launch.world import World
from frontier_llm.membership.connections import Connections
from frontier_llm.membership.roster_store import LateRanks, Roster, RosterStore

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_NEWS_SECONDS = 2.0
"""How long a member that fails waits for a newer roster. Usually it has lost contact with a dead
member, and the roster that replaces it is published within milliseconds."""
_CUT_SECONDS = 0.05
_CUTS_PER_ANSWER = 6
"""If a main thread still uses its connections after so many times, it probably waits for ranks that
do not connect."""
_STUCK_SECONDS = 60.0
"""How long the main thread may stay in one call of torch.distributed, or `abort` may take, after a
generation is over. A communicator that NCCL is creating cannot be aborted."""


class GenerationOverError(Exception):
    """A newer generation has begun, or another member is lost."""


@dataclass(frozen=True)
class Place:
    """The rank that a member holds in one generation."""

    generation: int
    world: World
    store: "Store"
    """Key-value store of this generation; its connection is cut when the generation is over."""
    timeout_seconds: float | None = None
    """Time limit of a collective with gloo; None: that of the configuration."""
    former_size: int = 0
    """If this process only saves what it has in memory, and then calls `report_done`: the number of
    ranks in the generation before; else 0."""


class Membership:
    """The main thread's view of a job in which it holds a rank from beginning to end.

    `abort` ends collectives that do not end when connections are cut; any thread calls it.
    `survives`: whether the process stays when another member dies.
    """

    def __init__(self, place: Place | None) -> None:
        self.abort: Callable[[], None] = lambda: None
        self.survives = False
        self._place, self._has_begun = place, False

    def next_place(self) -> Place | None:
        """Wait until this process holds a rank in a new generation; return None at the end."""
        place = None if self._has_begun else self._place
        self._has_begun = True
        return place

    def seal(self) -> None:
        """Announce that all connections of this generation are open."""

    def finish(self) -> None:
        """Report that the work of this rank is done, and wait until the work of all ranks is."""
        assert self._place is not None
        wait_for_exit(self._place.world, self._place.store)

    def report_done(self) -> None:
        """Report that the work of this rank in this generation is done."""

    def leave(self) -> None:
        """Announce that the main thread has stopped to use the connections of its generation."""

    def outlives(self, error: BaseException) -> bool:
        """Return whether an error means that another member is lost, so that this one stays."""
        return False

    def report_late(self, late: LateRanks) -> None:
        """Tell the coordinator which ranks hang or are slow; any thread may call this."""


Member = Callable[[Membership], None]
"""The work of a process that may hold a rank."""


def once(work: "Callable[[World, Store], None]") -> Member:
    """Return a member that does the work of its rank in one generation, and then ends."""

    def member(membership: Membership) -> None:
        place = membership.next_place()
        if place is None:
            return
        try:
            work(place.world, place.store)
        except StopRequested:
            membership.finish()
            raise
        membership.finish()
        membership.leave()

    return member


class RosterMembership(Membership):
    """Membership of the process with this number, in a job with a coordinator.

    `rank` is that of the current or last generation, and None before the first.
    """

    def __init__(
        self,
        number: int,
        world_of: Callable[[int], World],
        connect: "Callable[[], Store]",
        port: int,
        *,
        survives: bool = True,
    ) -> None:
        """Connect to the store at a TCP port."""
        super().__init__(None)
        self.number, self.survives = number, survives
        self.rank: int | None = None
        self._world_of, self._connect = world_of, connect
        self._control, self._reports = RosterStore(connect()), RosterStore(connect())
        self._news = RosterStore(connect())
        self._generation, self._announced, self._is_over = -1, -1, threading.Event()
        self._connections, self._size, self._timeout_seconds = Connections(port), 0, 0.0
        self._aborting = threading.Lock()
        threading.Thread(target=self._watch_rosters, name="membership", daemon=True).start()

    def next_place(self) -> Place | None:
        """Wait until the newest roster names this process; return its rank, or None at the end."""
        while True:
            generation = max(self._generation + 1, self._announced)
            roster = self._control.wait_for(generation)
            self._generation = generation
            if roster.members is None:
                return None
            if self.number in roster.members and (place := self._enter(roster)):
                return place

    def seal(self) -> None:
        """Announce that all connections of this generation are open."""
        self._connections.seal()

    def finish(self) -> None:
        """Report that the work of this rank is done, and wait until the work of all ranks is.

        Raises GenerationOverError if a member died before its work was done.
        """
        self.report_done()
        if self._control.wait_for(self._generation + 1).members is not None:
            raise GenerationOverError("another rank died before it was done")

    def report_done(self) -> None:
        """Report that the work of this rank in this generation is done."""
        self._control.report_done(self._generation)

    def leave(self) -> None:
        """Announce that the main thread has stopped to use the connections of its generation.

        Waits for an `abort` that has begun: it would reach the groups of the next generation.
        """
        self._connections.end()
        with self._aborting:
            pass

    def outlives(self, error: BaseException) -> bool:
        """Return whether an error means that another member is lost, so that this one stays.

        The coordinator is told of it at once, and takes a silent node sooner for lost. If no newer
        generation begins, it is told that all members have to connect again. In the first
        generation, ranks that cannot meet end the run, because the user may have to change
        something. Later they have met before, so that one of them hangs or is lost.
        """
        own = ConfigError, TrainingError, StopRequested
        if not self.survives or isinstance(error, own) or not isinstance(error, Exception):
            return False
        has_not_met = isinstance(error, LaunchError) and self._generation > 0
        is_failure = isinstance(error, RankFailure) or has_not_met
        is_loss = is_failure or is_lost_contact(error) or is_timeout(error)
        if is_loss:
            self._control.report_suspicion(self._generation)
        if self._is_over.wait(_NEWS_SECONDS) or isinstance(error, GenerationOverError):
            return True
        if is_loss:
            self._control.report_lost_contact(self._generation, self.rank)
        return is_loss

    def report_late(self, late: LateRanks) -> None:
        """Tell the coordinator which ranks hang or are slow; any thread may call this."""
        self._reports.report_late(self._generation, late)

    def _enter(self, roster: Roster) -> Place | None:
        from torch.distributed.distributed_c10d import PrefixStore

        assert roster.members is not None
        generation, self._size = roster.generation, len(roster.members)
        self._timeout_seconds = roster.timeout_seconds
        self.rank = roster.members.index(self.number)
        self._control.report_arrival(generation, self.rank)
        self._is_over.clear()
        self._connections.begin(generation)
        if self._announced > generation:
            self.leave()
            return None
        store = PrefixStore(f"generation/{generation}", self._connect())
        size = len(roster.members)
        world = self._world_of(self.rank)
        world = replace(world, size=size, job=f"{generation}", generation=generation)
        return Place(generation, world, store, roster.timeout_seconds, roster.former_size)

    def _watch_rosters(self) -> None:
        """Wait for rosters, and end what the main thread does when there is a newer one."""
        generation = 0
        while True:
            try:
                self._news.wait_until_published(generation)
                self._news.report_seen(generation, self.number)
            except RuntimeError:
                return  # the store is gone, and with it the launcher
            self._announced = generation
            if generation > self._generation >= 0:
                self._is_over.set()
                threading.Thread(target=self._cut, args=(generation,), daemon=True).start()
            generation += 1

    def _cut(self, generation: int) -> None:
        """Shut connections down until the main thread has left the generation before.

        Ends the process if neither this nor `abort` can end a call of the main thread.
        """
        aborting = threading.Thread(target=self._abort, args=(generation,), daemon=True)
        aborting.start()
        aborting.join(_STUCK_SECONDS)
        if aborting.is_alive():
            self._end_process("the groups cannot be aborted")
        cuts, moved = 0, time.monotonic()
        while self._connections.cut(before=generation):
            time.sleep(_CUT_SECONDS)
            cuts += 1
            now = time.monotonic()
            moved = moved if _is_in_torch_distributed() else now
            if now - moved > _STUCK_SECONDS + self._timeout_seconds:
                self._end_process("a call of torch.distributed does not end")
            if cuts % _CUTS_PER_ANSWER == 0:
                self._connections.answer(before=generation, size=self._size)

    def _abort(self, generation: int) -> None:
        with self._aborting:
            if self._connections.are_used(before=generation):
                self.abort()

    def _end_process(self, reason: str) -> None:
        sys.stderr.write(
            f"[rank {self.rank}] {reason} after another rank died: the process ends, and is "
            "replaced\n"
        )
        sys.stderr.flush()
        os._exit(1)


def _is_in_torch_distributed() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            return True
        frame = frame.f_back
    return False
