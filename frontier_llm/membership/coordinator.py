"""Decides which processes hold the ranks of a job, and gives the ranks of dead ones to others.

The coordinator publishes a roster for each generation, in a store that the members read
(roster_store.py). It begins a new generation if a member has died, or has lost contact with another
one. A member that a watchdog finds late is killed and thus replaced. The job ends if a message says
what the user has to do, or if members fail again and again without a new step.

The processes may be children of the launcher on this machine (replacement.py), or of the tasks of a
Slurm job (agents.py).
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from frontier_llm.errors import print_error
from frontier_llm.launch import failure
from frontier_llm.launch.failure import Ended
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.membership.roster_store import Roster, RosterStore
from frontier_llm.membership.successors import Members, Successors

RANKS_FILE = "ranks.jsonl"
"""File in the run directory with a line for each process that gets a rank."""
SWAP_FILE = "SWAP"
"""File in the run directory with the number of a rank, whose process is to be replaced."""
_STOPPED_SECONDS = 8.0
"""An absent member of which not even a thread has read the roster after this time is killed, since
its process is stopped. A thread of a member that is only slow reads it at once."""
_POLLS_PER_LOOK = 25


PATIENCE_SECONDS = 2.0
"""If nobody is replaced: how long the other members may run after one has failed, before their
connections are cut."""
TERMINATION_SECONDS = 5.0
"""How much longer they may run before they are killed."""


@dataclass(frozen=True)
class Replacing:
    """How members of a job are replaced; by default they are not."""

    run_dir: Path = Path()
    spares: int = 0
    """Number of processes that wait for a rank."""
    tries: int = 0
    """Largest number of new generations without a new step; 0: the first failure ends the job."""
    timeout_seconds: float = 0.0
    """Time limit of a collective with gloo, in the first generation."""
    steps_done: Callable[[], int] = lambda: 0
    save_seconds: float = 600.0
    """How long the remaining ranks may take to save what they have in memory."""
    arrival_seconds: float = 900.0
    """How long a member that runs may take to come to a new generation. It notices at its next
    collective that its generation is over, so this is the longest time without a collective."""
    together: int = 1
    """How many neighbouring ranks move to another node only together, because they write files on
    a node's disk or in its memory together; 1: each moves alone."""
    fitting: Callable[[int], int | None] = lambda _: None
    """Returns on how many of the ranks that are left the run can continue; None: on no number."""


@dataclass(frozen=True)
class LastSave:
    """A generation in which the remaining members save what they have in memory."""

    dead: dict[int, failure.Failure]
    former: int
    shrinks: bool
    """Whether the run then continues on fewer ranks; else it ends."""


@dataclass
class Ending:
    """The end of a job in which nobody is replaced: the members left may say why they fail."""

    began: float
    dead: dict[int, failure.Failure]
    gone: set[int]
    """Ranks whose processes have ended."""
    is_announced: bool = False


class Coordinator:
    """Keeps the roster of a job; one process of the job calls `poll` again and again."""

    def __init__(
        self,
        members: Members,
        store: RosterStore,
        first: Iterable[int],
        options: LaunchOptions,
        replacing: Replacing,
    ) -> None:
        self._members, self._store = members, store
        self._options, self._replacing = options, replacing
        self._roster = list(first)
        self._generation, self._published = -1, 0.0
        self._has_arrived = False
        self._lost_at: float | None = None
        self._timeout_seconds = replacing.timeout_seconds
        self._tries, self._last_steps = 0, replacing.steps_done()
        self._polls = 0
        self._successors = Successors(members, replacing.together)
        self._ended: dict[int, failure.Failure] = {}  # by rank: not yet replaced
        self._recorded: set[int] = set()  # processes with a line in the file of ranks
        self._told: set[str] = set()  # what has been printed of errors of the file system
        self._last_save: LastSave | None = None
        self._ending: Ending | None = None
        self._begin_generation()

    def poll(self) -> Ended | None:
        """Replace members that have died; return how the job ended, None while it runs."""
        if self._last_save is not None:
            return self._follow_last_save(self._last_save)
        if self._ending is not None:
            return self._follow_end(self._ending)
        if self._is_done():
            return Ended(0)
        self._ended |= self._take_dead()
        if not self._successors.have_ended(self._ended, self._roster):
            return None
        dead, self._ended = self._ended, {}
        if not self._replacing.tries:
            self._ending = Ending(time.monotonic(), dead, set(dead)) if dead else None
            return None
        if dead or self._has_lost_contact():
            if (ended := self._end_after(dead)) or self._last_save is not None:
                return ended
            self._replace(dead) if dead else self._connect_again()
        self._kill_late()
        self._swap()
        return None

    def end(self) -> None:
        """Tell all members that the job is over."""
        self._clear_failures()  # of spares, for example: those from now on are requests to stop
        self._publish(Roster(self._generation + 1, None))

    def _connect_again(self) -> None:
        """Begin a generation with the same members and more patience."""
        longest = self._options.store_timeout.total_seconds()
        self._timeout_seconds = min(2 * self._timeout_seconds, longest)
        print_error(
            "ranks lost contact with each other, and all of them run: they connect again, with a "
            f"time limit of {self._timeout_seconds:g} s for a collective"
        )
        self._begin_generation()

    def _begin_generation(self, former: int = 0) -> None:
        self._generation += 1
        self._has_arrived, self._lost_at = False, None
        self._publish(Roster(self._generation, tuple(self._roster), self._timeout_seconds, former))

    def _publish(self, roster: Roster) -> None:
        self._published = time.monotonic()
        if self._replacing.tries:
            with self._tolerated("the starts of ranks cannot be recorded"):
                self._record_starts(roster.generation)
        self._store.publish(roster)

    def _record_starts(self, generation: int) -> None:
        ranks = enumerate(self._roster)
        new = [(rank, number) for rank, number in ranks if number not in self._recorded]
        with (self._replacing.run_dir / RANKS_FILE).open("a") as file:
            for rank, number in new:
                host, pid = self._members.place(number)
                line = {
                    "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                    "generation": generation,
                    "rank": rank,
                    "process": number,
                    "pid": pid,
                    "host": host,
                }
                file.write(json.dumps(line) + "\n")
        self._recorded.update(number for _, number in new)

    def _is_done(self) -> bool:
        return self._store.count_done(self._generation) == len(self._roster)

    def _take_dead(self) -> dict[int, failure.Failure]:
        dead = {}
        is_forming = self._generation > 0 and not self._has_arrived
        is_suspicious = is_forming or self._store.is_suspicious(self._generation)
        ended = self._members.take_ended(is_suspicious=is_suspicious)
        for number, (code, seconds, reason) in ended.items():
            if number in self._roster:
                rank = self._roster.index(number)
                failed = failure.died(rank, code, seconds)
                with self._tolerated("why ranks failed cannot be read"):
                    failed = failure.read_rank(rank, self._options.failure_dir) or failed
                dead[rank] = failed
                if reason:
                    dead[rank] = replace(failed, message=f"rank {rank} {reason}")
                    self._successors.leave_lost_node(rank, self._roster)
        return dead

    def _end_after(self, dead: dict[int, failure.Failure]) -> Ended | None:
        """Return how the job ended if it cannot go on after these failures; else None."""
        final = [failed for failed in dead.values() if failed.kind in ("user", "stopped")]
        steps = self._replacing.steps_done()
        # the last failure counts, not the most steps: after a loss the run may have gone far back
        self._tries = 1 if steps > self._last_steps else self._tries + 1
        self._last_steps = steps
        if not final and self._tries <= self._replacing.tries:
            return None
        if not final:
            happened = "failed" if dead else "lost contact with each other"
            print_error(
                f"ranks {happened} {self._tries} times without a new step: they are not replaced "
                "again (recovery.tries)"
            )
            self._begin_last_save(dead, dead, shrinks=False)
            return None
        self._members.kill(set(self._roster) - {self._roster[rank] for rank in dead})
        return self._report_cause(dead)

    def _follow_end(self, ending: Ending) -> Ended | None:
        """Wait for the ends of members that lose contact; then end and kill those that stay."""
        for rank, failed in self._take_dead().items():
            ending.gone.add(rank)
            if failed.kind != "died" or not ending.is_announced:
                ending.dead[rank] = failed
        left = [rank for rank in range(len(self._roster)) if rank not in ending.gone]
        if not left:
            return self._report_cause(ending.dead)
        waited = time.monotonic() - ending.began
        if waited > PATIENCE_SECONDS and not ending.is_announced:
            ending.is_announced = True
            self._publish(Roster(self._generation + 1, None))
        if waited > PATIENCE_SECONDS + TERMINATION_SECONDS:
            self._kill(left)
        return None

    def _replace(self, dead: dict[int, failure.Failure]) -> None:
        missing = self._successors.assign(dead, self._roster)
        if missing:
            shrinks = self._replacing.fitting(len(self._roster) - len(missing)) is not None
            if not shrinks:
                print_error(
                    "the run ends, because ranks are missing. To prevent this: recovery.spares, or "
                    "launch.elastic=true, with which a run continues on fewer ranks"
                )
            self._begin_last_save(missing, dead, shrinks=shrinks)
            return
        self._clear_failures()
        self._begin_generation()

    def _begin_last_save(
        self, missing: Collection[int], dead: dict[int, failure.Failure], *, shrinks: bool
    ) -> None:
        """Let the remaining members save what they have in memory, before ranks are given up."""
        former, self._roster = len(self._roster), self._without(missing)
        self._last_save = LastSave(dead, former, shrinks)
        self._begin_generation(former)

    def _without(self, ranks: Collection[int]) -> list[int]:
        return [number for rank, number in enumerate(self._roster) if rank not in ranks]

    def _follow_last_save(self, last: LastSave) -> Ended | None:
        """Continue on fewer ranks, or end, once the remaining members have saved or failed."""
        self._kill_late()
        dead = self._take_dead()
        is_late = time.monotonic() - self._published > self._replacing.save_seconds
        if not (dead or is_late or self._is_done()):
            return None
        if dead or is_late:
            reason = ", ".join(map(failure.in_one_line, dead.values())) or "they take too long"
            print_error(f"the remaining ranks could not save the last step: {reason}")
            self._roster = self._without(dead)
        self._last_save = None
        size = self._replacing.fitting(len(self._roster)) if last.shrinks else None
        if size is None:
            self._members.kill(self._roster)
            ended = self._report_cause(last.dead)
            if ended.cause is None:
                print_error(
                    "the run ends, because ranks lost contact with each other again and again, "
                    "although all of them run: look for errors of the network"
                )
            return ended
        print_error(f"the run continues on {size} instead of {last.former} ranks")
        self._roster = self._roster[:size]
        self._clear_failures()
        self._begin_generation()
        return None

    def _has_lost_contact(self) -> bool:
        """Return whether members have lost contact with each other, and all of them run."""
        if self._lost_at is None and self._store.has_lost_contact(self._generation):
            self._lost_at = time.monotonic()
        if self._lost_at is None:
            return False
        return time.monotonic() - self._lost_at > self._members.patience_seconds

    def _kill_late(self) -> None:
        """Kill members that a watchdog has found late, or that do not come to their generation."""
        if (late := self._store.take_late(self._generation)) is not None:
            print_error(late.diagnosis)
            if late.elsewhere:
                self._successors.move(late.ranks, self._roster)
            elif late.ranks:
                self._kill(late.ranks)
            else:
                self._lost_at = self._lost_at or time.monotonic()
        if self._has_arrived:
            return
        self._has_arrived = self._store.count_arrivals(self._generation) == len(self._roster)
        if self._has_arrived or (waited := time.monotonic() - self._published) < _STOPPED_SECONDS:
            return
        slow, stopped = self._store.absent_ranks(self._generation, self._roster)
        self._kill(stopped)
        if waited > self._timeout_seconds + self._replacing.arrival_seconds:
            self._kill(slow)

    def _kill(self, ranks: Sequence[int]) -> None:
        self._members.kill(self._roster[rank] for rank in ranks)

    def _swap(self) -> None:
        self._polls += 1
        if self._polls % _POLLS_PER_LOOK or (text := self._take_swap()) is None:
            return
        rank = text.strip().removeprefix("rank=")
        if not rank.isdigit() or int(rank) >= len(self._roster):
            print_error(
                f"{self._replacing.run_dir / SWAP_FILE} says {text.strip()!r}, and not a rank: "
                "write rank=0, for example"
            )
            return
        self._successors.swap(int(rank), self._roster)

    def _take_swap(self) -> str | None:
        path = self._replacing.run_dir / SWAP_FILE
        with self._tolerated("the file SWAP cannot be read or removed"):
            if path.exists() and (text := path.read_text()):  # else it is being written
                path.unlink()
                return text
        return None

    def _clear_failures(self) -> None:
        with self._tolerated("the descriptions of earlier failures cannot be removed"):
            failure.clear(self._options.failure_dir)

    def _report_cause(self, dead: dict[int, failure.Failure]) -> Ended:
        ended = failure.report_cause(dead, self._options.ranks, self._options.failure_dir)
        return ended if ended.exit_code else Ended(1)

    @contextmanager
    def _tolerated(self, what: str) -> Iterator[None]:
        """Go on after an error of the file system, which must not end the job; print it once."""
        try:
            yield
        except OSError as error:
            if what not in self._told:
                self._told.add(what)
                print_error(f"{what}, and the run goes on: {error}")
