"""Start ranks on this machine and wait for them; if one dies, replace it, or end all and say why.

The launcher forks the processes, and coordinates them (coordinator.py). If ranks are replaced, that
of a dead process goes to a spare, or to a process that is forked then. If not, the others get 2 s
to end by themselves, then their connections are cut, and after another 5 s they are killed. When
every rank has ended, the failure that caused the others is printed.
"""

import platform
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from frontier_llm.errors import LaunchError, print_error
from frontier_llm.launch import failure
from frontier_llm.launch.failure import Ended, report_cause, run_rank
from frontier_llm.launch.forked_ranks import (
    POLL_SECONDS,
    ForkedRanks,
    LaunchOptions,
    fork_rank,
    local_world,
)
from frontier_llm.launch.rendezvous import connect_again, listen, raise_file_limit
from frontier_llm.launch.stop import ParentSignals
from frontier_llm.launch.world import World
from frontier_llm.membership.coordinator import Coordinator, Replacing
from frontier_llm.membership.member import Member, RosterMembership
from frontier_llm.membership.roster_store import RosterStore

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_EXIT_SECONDS = 30.0
"""How long members may take to exit after the end of the job."""
_KEEPER_SECONDS = 1.0
"""How long to wait for the end of the store's process after an error of the store, and how long to
try to connect before looking whether it has ended."""

INTERRUPTED = 130
"""Exit code after a second Ctrl-C, as in shells."""
_NOBODY_IS_REPLACED = Replacing()


def launch(
    target: Member, options: LaunchOptions, replacing: Replacing = _NOBODY_IS_REPLACED
) -> Ended:
    """Run `target` on forked processes until all ranks are done; print the cause of a failure.

    The first SIGINT, SIGTERM or SIGUSR1 asks all ranks to save and stop; they receive SIGTERM. A
    second SIGINT kills them at once. No process outlives this call or this process. Raises a
    LaunchError if the port is in use, a process cannot be started, the store may not open enough
    files, or the process that holds the store ended.
    """
    raise_file_limit(options.ranks + replacing.spares, options.connections)
    failure.clear(options.failure_dir)
    server = listen("127.0.0.1", options.port or 0)
    port = server.getsockname()[1]
    keeper = ForkedRanks()
    connect = partial(connect_again, "127.0.0.1", port, options.store_timeout)
    with ParentSignals() as signals:
        members = ForkedMembers(target, options, connect, port, replacing)
        try:
            fork_rank(keeper, 0, partial(keep_store, server))
            server.close()
            members.start()
            store = RosterStore(_connect_while(keeper, port, options.store_timeout))
            coordinator = Coordinator(members, store, range(options.ranks), options, replacing)
            return _coordinate(coordinator, members, signals, options)
        except RuntimeError as error:
            _check_keeper(keeper, error)
            raise
        finally:
            members.processes.kill()
            keeper.kill()


def _coordinate(
    coordinator: Coordinator,
    members: "ForkedMembers",
    signals: ParentSignals,
    options: LaunchOptions,
) -> Ended:
    while (ended := coordinator.poll()) is None:
        if signals.second_interrupt:
            print_error("killed by the second Ctrl-C; steps after the newest checkpoint are lost")
            return Ended(INTERRUPTED)
        if signals.take_stop():
            print_error("stopping after the current step (Ctrl-C once more kills at once)")
            members.processes.send(signal.SIGTERM)
        time.sleep(POLL_SECONDS)
    if ended.exit_code:
        return ended
    coordinator.end()
    members.processes.wait(_EXIT_SECONDS)
    # a request to stop has an exit code of its own
    return report_cause({}, options.ranks, options.failure_dir)


def _connect_while(keeper: ForkedRanks, port: int, timeout: timedelta) -> "Store":
    """Connect to the store; raises RuntimeError as soon as its process has ended."""
    limit = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store = connect_again("127.0.0.1", port, timedelta(seconds=_KEEPER_SECONDS))
        except RuntimeError:
            keeper.poll()
            if keeper.ended or time.monotonic() > limit:
                raise
        else:
            store.set_timeout(timeout)
            return store


def _check_keeper(keeper: ForkedRanks, error: RuntimeError) -> None:
    """Raise LaunchError if the process that holds the store has ended."""
    keeper.wait(_KEEPER_SECONDS)  # the kernel may close its sockets first
    for code, _ in keeper.ended.values():
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        raise LaunchError(
            f"the process that holds the key-value store of the ranks {end}. They cannot work "
            "without it, and are killed. Start the run again: it resumes from its newest "
            "checkpoint, if one was saved. If the machine was short of memory, use fewer ranks"
        ) from error


def keep_store(server: socket.socket) -> int:
    """Hold the key-value store until this process is killed."""
    from torch.distributed import TCPStore

    address, port = server.getsockname()[:2]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
    while store is not None:
        signal.pause()
    return 0


class ForkedMembers:
    """Members that this process has forked; see `Members`."""

    patience_seconds = 0.3

    def __init__(
        self,
        target: Member,
        options: LaunchOptions,
        connect: "Callable[[], Store]",
        port: int,
        replacing: Replacing,
    ) -> None:
        self._target, self._options, self._connect = target, options, connect
        self._port, self._wanted = port, options.ranks + replacing.spares
        self._survive = replacing.tries > 0
        self._forked = 0
        self.processes = ForkedRanks()

    def start(self) -> None:
        """Fork the members and the spares."""
        while len(self.processes.running) < self._wanted:
            self._fork()

    def take_ended(self, *, is_suspicious: bool = False) -> Mapping[int, tuple[int, float, str]]:
        """Return the processes that have ended, whose end this process always sees."""
        self.processes.poll()
        ended = {number: (*how, "") for number, how in self.processes.ended.items()}
        self.processes.ended.clear()
        return ended

    def waiting(self, held: Collection[int]) -> list[int]:
        """Return the processes that run and hold no rank."""
        return [number for number in self.processes.running if number not in held]

    def successor(self, number: int, held: Collection[int], *, elsewhere: bool = False) -> int:
        """Return a process that waits, or a new one."""
        waiting = self.waiting(held)
        chosen = min(waiting) if waiting else self._fork()
        self.start()
        return chosen

    def kill(self, numbers: Iterable[int]) -> None:
        """Kill processes."""
        for number in numbers:
            self.processes.kill_rank(number)

    def place(self, number: int) -> tuple[str, int]:
        """Return host and process id."""
        return platform.node(), self.processes.running.get(number, 0)

    def _fork(self) -> int:
        number, self._forked = self._forked, self._forked + 1
        options, port = self._options, self._port

        def run() -> int:
            world_of = partial(local_world, options=options, port=port)
            connect, survives = self._connect, self._survive
            return run_member_process(
                number, self._target, options, world_of, connect, survives=survives
            )

        fork_rank(self.processes, number, run)
        return number


def run_member_process(
    number: int,
    target: Member,
    options: LaunchOptions,
    world_of: Callable[[int], World],
    connect: "Callable[[], Store]",
    *,
    survives: bool = True,
) -> int:
    """Do the work of a member, in a process that was forked for it; return the exit code.

    `world_of` returns the `World` of a rank in this process.
    """
    import torch

    torch.set_num_threads(options.threads)
    port = world_of(0).master_port
    membership = RosterMembership(number, world_of, connect, port, survives=survives)

    def rank() -> int:  # a spare has none, and gets a number that no rank has
        return options.ranks + number if membership.rank is None else membership.rank

    return run_rank(lambda: target(membership), rank, options.failure_dir)
