"""Start ranks on this machine, and replace those that die while the others keep what they have.

The launcher publishes a roster for each generation (roster.py). It begins a new generation if a
member has died, or has lost contact with another one. The rank of a dead member goes to a spare, or
to a process that is forked then. A member that a watchdog finds late is killed and thus replaced.

The job ends if a message says what the user has to do, or if members fail again and again without a
new step.
"""

import json
import os
import platform
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.launch import failure
from frontier_llm.launch.forked_ranks import POLL_SECONDS, ForkedRanks
from frontier_llm.launch.launcher import (
    INTERRUPTED,
    Ended,
    LaunchOptions,
    fork_rank,
    local_world,
    print_error,
    report_cause,
)
from frontier_llm.launch.membership import Membership
from frontier_llm.launch.rank import run_rank
from frontier_llm.launch.rendezvous import listen
from frontier_llm.launch.roster import (
    Roster,
    arrived_key,
    done_key,
    late_key,
    lost_key,
    roster_key,
)
from frontier_llm.launch.stop import ParentSignals

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

RANKS_FILE = "ranks.jsonl"
"""File in the run directory that has a line for each start of a rank."""
SWAP_FILE = "SWAP"
"""File in the run directory with the number of a rank, whose process is to be replaced."""
_LOST_SECONDS = 0.3
"""How long the launcher waits for the end of a process after a member has lost contact."""
_ARRIVAL_SECONDS = 30.0
"""A member that does not read its roster within this time, after the time limit of a collective, is
killed: it may notice that its generation is over only when a collective fails."""
_EXIT_SECONDS = 30.0
"""How long members may take to exit after the end of the job."""
_SECOND_LOOK = 25
"""Number of polls between two looks for the file `SWAP`."""

MemberTarget = Callable[[Membership], None]
"""The work of a process that may hold a rank."""


@dataclass(frozen=True)
class Replacing:
    """How members of a job are replaced."""

    run_dir: Path
    """The run directory."""
    spares: int
    """Number of processes that wait for a rank."""
    tries: int
    """Largest number of new generations without a new step."""
    timeout_seconds: float
    """Time limit of a collective with gloo, in the first generation."""
    steps_done: Callable[[], int]
    """Returns the number of steps of which the run has records."""


def launch_replacing(target: MemberTarget, options: LaunchOptions, replacing: Replacing) -> Ended:
    """Run `target` on forked processes until all ranks are done, and replace those that die.

    Signals are handled as by `launch`. No process outlives this call or this process.

    Args:
        target: the work of a process; an exception in it ends the process.
        options: number of ranks, port and the folder for failures.
        replacing: how processes are replaced.

    Returns:
        How the job ended. The cause of a failure is printed to stderr.

    Raises:
        LaunchError: the port is in use, or a process cannot be started.
    """
    failure.clear(options.failure_dir)
    server = listen("127.0.0.1", options.port or 0)
    port = server.getsockname()[1]
    keeper = ForkedRanks()
    with ParentSignals() as signals:
        job = _Job(target, options, replacing, port)
        try:
            fork_rank(keeper, 0, partial(_keep_store, server))
            server.close()
            job.start()
            return job.run(signals)
        finally:
            job.members.kill()
            keeper.kill()


def _keep_store(server: socket.socket) -> int:
    """Hold the key-value store until this process is killed."""
    from torch.distributed import TCPStore

    address, port = server.getsockname()[:2]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
    while store is not None:
        signal.pause()
    return 0


class _Job:
    """The members of a job, as the launcher sees them."""

    def __init__(
        self, target: MemberTarget, options: LaunchOptions, replacing: Replacing, port: int
    ) -> None:
        self._target, self._options, self._replacing = target, options, replacing
        self._port = port
        self.members = ForkedRanks()
        self._roster: list[int] = list(range(options.ranks))
        self._generation, self._forked = -1, 0
        self._published = 0.0
        self._has_arrived = False
        self._lost_at: float | None = None
        self._timeout_seconds = replacing.timeout_seconds
        self._tries, self._most_steps = 0, replacing.steps_done()
        self._store: Store | None = None
        self._polls = 0
        self._recorded: set[int] = set()

    def start(self) -> None:
        """Fork the members and the spares, and begin the first generation."""
        for _ in range(self._options.ranks + self._replacing.spares):
            self._fork()
        self._store = _connect(self._port, self._options.store_timeout)
        self._begin_generation()

    def run(self, signals: ParentSignals) -> Ended:
        """Replace members until all are done or the job has failed; return how it ended."""
        while not self._is_done():
            if signals.second_interrupt:
                print_error("killed by the second Ctrl-C; no checkpoint was saved")
                return Ended(INTERRUPTED)
            if signals.take_stop():
                print_error("stopping after the current step (Ctrl-C once more kills at once)")
                self.members.send(signal.SIGTERM)
            dead = self._take_dead()
            if dead and (ended := self._end_after(dead)):
                return ended
            if dead:
                self._replace(dead)
            elif self._has_lost_contact():
                if ended := self._end_after({}):
                    return ended
                longest = self._options.store_timeout.total_seconds()
                self._timeout_seconds = min(2 * self._timeout_seconds, longest)
                print_error(
                    "ranks lost contact with each other, and all of them run: they connect again, "
                    f"with a time limit of {self._timeout_seconds:g} s for a collective"
                )
                self._begin_generation()
            self._kill_late()
            self._swap()
            time.sleep(POLL_SECONDS)
        self._publish(Roster(self._generation + 1, None))
        deadline = time.monotonic() + _EXIT_SECONDS
        while self.members.running and time.monotonic() < deadline:
            self.members.poll()
            time.sleep(POLL_SECONDS)
        return report_cause({}, self._options)

    @property
    def _connected(self) -> "Store":
        assert self._store is not None
        return self._store

    def _fork(self) -> int:
        """Fork a process that waits for a rank; return its number."""
        number, self._forked = self._forked, self._forked + 1
        options, port = self._options, self._port

        def run() -> int:
            import torch
            from torch.distributed.distributed_c10d import PrefixStore

            torch.set_num_threads(options.threads)
            membership = Membership(
                number,
                lambda rank: local_world(rank, options, port),
                lambda: _connect(port, options.store_timeout),
                PrefixStore,
            )

            def rank() -> int:  # a spare has none, and gets a number that no rank has
                return options.ranks + number if membership.rank is None else membership.rank

            return run_rank(lambda: self._target(membership), rank, options.failure_dir)

        fork_rank(self.members, number, run)
        return number

    def _begin_generation(self) -> None:
        self._generation += 1
        self._has_arrived, self._lost_at = False, None
        self._publish(Roster(self._generation, tuple(self._roster), self._timeout_seconds))

    def _publish(self, roster: Roster) -> None:
        self._published = time.monotonic()
        self._record()
        self._connected.set(roster_key(roster.generation), roster.to_json())

    def _record(self) -> None:
        """Add a line to `ranks.jsonl` for each process that has got a rank."""
        with (self._replacing.run_dir / RANKS_FILE).open("a") as file:
            for rank, number in enumerate(self._roster):
                if number not in self._recorded:
                    self._recorded.add(number)
                    line = {
                        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                        "generation": self._generation,
                        "rank": rank,
                        "process": number,
                        "pid": self.members.running.get(number),
                        "host": platform.node(),
                    }
                    file.write(json.dumps(line) + "\n")

    def _is_done(self) -> bool:
        return bool(self._connected.add(done_key(self._generation), 0) == len(self._roster))

    def _take_dead(self) -> dict[int, failure.Failure]:
        """Return how members ended since the last call, by rank; replace spares that ended."""
        self.members.poll()
        dead = {}
        for number, (code, seconds) in self.members.ended.items():
            if number in self._roster:
                rank = self._roster.index(number)
                written = failure.read_rank(rank, self._options.failure_dir)
                dead[rank] = written or failure.died(rank, code, seconds)
        self.members.ended.clear()
        return dead

    def _end_after(self, dead: dict[int, failure.Failure]) -> Ended | None:
        """Return how the job ended if it cannot go on after these failures; else None."""
        final = [failed for failed in dead.values() if failed.kind in ("user", "stopped")]
        steps = self._replacing.steps_done()
        self._tries = 1 if steps > self._most_steps else self._tries + 1
        self._most_steps = max(steps, self._most_steps)
        if not final and self._tries <= self._replacing.tries:
            return None
        self.members.kill()
        ended = report_cause(dead, self._options)
        if not final:
            print_error(
                f"ranks failed {self._tries} times without a new step: they are not replaced again "
                "(recovery.tries)"
            )
        return ended if ended.exit_code else Ended(1)

    def _replace(self, dead: dict[int, failure.Failure]) -> None:
        """Give the ranks of dead members to other processes, and begin a generation."""
        for rank, failed in dead.items():
            waiting = [n for n in self.members.running if n not in self._roster]
            number = min(waiting) if waiting else self._fork()
            self._roster[rank] = number
            print_error(f"{_describe(failed)}; process {number} takes its place")
        failure.clear(self._options.failure_dir)
        self._begin_generation()
        while len(self.members.running) < self._options.ranks + self._replacing.spares:
            self._fork()

    def _has_lost_contact(self) -> bool:
        """Return whether members have lost contact with each other, and all of them run."""
        if self._lost_at is None and self._connected.check([lost_key(self._generation)]):
            self._lost_at = time.monotonic()
        return self._lost_at is not None and time.monotonic() - self._lost_at > _LOST_SECONDS

    def _kill_late(self) -> None:
        """Kill members that a watchdog has found late, or that do not come to their generation."""
        key = late_key(self._generation)
        if self._connected.check([key]):
            late = json.loads(self._connected.get(key))
            self._connected.delete_key(key)
            print_error(late["diagnosis"])
            if not late["ranks"]:
                self._lost_at = self._lost_at or time.monotonic()
            self._kill(late["ranks"])
        if self._has_arrived:
            return
        absent = [
            rank
            for rank in range(len(self._roster))
            if not self._connected.check([arrived_key(self._generation, rank)])
        ]
        self._has_arrived = not absent
        waited = time.monotonic() - self._published
        if absent and waited > self._timeout_seconds + _ARRIVAL_SECONDS:
            self._kill(absent)

    def _kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            if (pid := self.members.running.get(self._roster[rank])) is not None:
                os.kill(pid, signal.SIGKILL)

    def _swap(self) -> None:
        """Replace the member of the rank that the file `SWAP` names."""
        self._polls += 1
        path = self._replacing.run_dir / SWAP_FILE
        if self._polls % _SECOND_LOOK or not path.exists():
            return
        text = path.read_text()
        path.unlink()
        rank = text.strip().removeprefix("rank=")
        if not rank.isdigit() or int(rank) >= len(self._roster):
            print_error(f"{path} says {text.strip()!r}, and not a rank: write rank=0, for example")
            return
        self._kill([int(rank)])


def _connect(port: int, timeout: timedelta) -> "Store":
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)


def _describe(failed: failure.Failure) -> str:
    """Return the first line of a failure, with its rank."""
    if failed.kind == "died":
        return failed.message.partition(",")[0]
    return f"rank {failed.rank} failed with {failed.name}: {failed.message.splitlines()[0]}"
