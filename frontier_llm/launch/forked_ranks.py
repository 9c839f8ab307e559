"""Forks the ranks of one machine, notices when they end, and sends them signals.

The process that forks the ranks is called the parent. It must not have run multi-threaded torch
operations: a fork copies the state of the thread pool but not its threads, and the child would wait
for them forever.
"""

import ctypes
import gc
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from frontier_llm.errors import LaunchError, flush_output
from frontier_llm.launch.rendezvous import MIN_CONNECTIONS
from frontier_llm.launch.stop import STOP_SIGNALS, StopFlag
from frontier_llm.launch.world import World

POLL_SECONDS = 0.02
HUNG_SECONDS = 5.0
"""After this time a rank counts as ended although one of its threads still waits for a file system
that hangs. The kernel does not report such a process to `waitpid`."""
_DEATH_SECONDS = 15.0
"""So long after SIGKILL a rank counts as ended although it still exists. The kernel cannot end it
while it waits for a device or a file system that does not answer. It will run no further line of
this program."""
_LOOK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchOptions:
    """How many ranks to start on this machine, and how."""

    ranks: int
    failure_dir: Path
    """Folder for the tracebacks of failing ranks; created when needed."""
    ranks_per_node: int | None = None
    """Consecutive ranks that count as one node; None = all ranks are on one node."""
    port: int | None = None
    """TCP port of the store; None = any free port."""
    threads: int = 1
    """CPU threads per rank."""
    connections: int = MIN_CONNECTIONS
    """Connections of each rank to the store, at most."""
    store_timeout: timedelta = timedelta(seconds=60)
    """How long a rank waits for the store, and for a key in it."""


class ForkedRanks:
    """The forked ranks of this process.

    `running` has the process id of each rank that runs. `ended` has the exit code, negative for a
    signal, and the time of each rank that ended, in seconds since 1970, which may be up to
    `POLL_SECONDS` too early.
    """

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.ended: dict[int, tuple[int, float]] = {}
        self._looked_at: dict[int, float] = {}  # monotonic time of the last look, by process id
        self._zombie_since: dict[int, float] = {}
        self._killed_at: dict[int, float] = {}  # monotonic time of SIGKILL, by process id

    def fork(self, rank: int, run: Callable[[], int]) -> None:
        """Fork a rank that calls `run` and exits with the code that it returns.

        Stop signals must be blocked by the caller. The kernel kills the rank if this process ends.
        """
        parent = os.getpid()
        flush_output()
        pid = os.fork()
        if pid:
            self.running[rank] = pid
            return
        gc.freeze()  # garbage collection would write to memory shared with the parent and copy it
        code = 1
        try:
            _die_with_parent(parent)
            code = run()
        finally:
            flush_output()
            os._exit(code)  # skips the exit handlers, which belong to the parent

    def poll(self) -> None:
        """Record the ranks that have ended since the last call."""
        for rank, pid in list(self.running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else self._code_if_hung(pid)
            code = self._code_if_killed(pid) if code is None else code
            if code is not None:
                self.ended[rank] = code, time.time() - POLL_SECONDS
                del self.running[rank]

    def _code_if_hung(self, pid: int) -> int | None:
        """Return the exit code of a rank whose main thread has ended some seconds ago, else None.

        Its other threads cannot end before the file system answers.
        """
        now = time.monotonic()
        if now - self._looked_at.get(pid, 0.0) < _LOOK_SECONDS:
            return None
        self._looked_at[pid] = now
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] != "Z":
            return None
        if now - self._zombie_since.setdefault(pid, now) < HUNG_SECONDS:
            return None
        return os.waitstatus_to_exitcode(int(fields[-1]))  # the last field is `exit_code`

    def _code_if_killed(self, pid: int) -> int | None:
        """Return the exit code of a rank that was killed some time ago but still exists, else None.

        It cannot be seen whether the kernel will ever end it.
        """
        killed_at = self._killed_at.get(pid)
        if killed_at is None or time.monotonic() - killed_at < _DEATH_SECONDS:
            return None
        _LOG.warning(
            "process %d was killed %g s ago and still exists, probably because a device or a file "
            "system does not answer: it counts as ended",
            pid,
            _DEATH_SECONDS,
        )
        return -signal.SIGKILL

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that still runs."""
        for rank in self.running:
            self._send(rank, number)

    def kill_rank(self, rank: int) -> None:
        """Kill a rank if it still runs; `poll` will find that it has ended."""
        if rank in self.running:
            self._send(rank, signal.SIGKILL)

    def _send(self, rank: int, number: signal.Signals) -> None:
        pid = self.running[rank]
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self._killed_at.setdefault(pid, time.monotonic())

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have ended by themselves, at most for some time."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            self.poll()
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kill every rank that still runs, and wait until all have ended, or count as ended."""
        self.send(signal.SIGKILL)
        while self.running:
            self.poll()
            time.sleep(POLL_SECONDS / 10)


def local_world(rank: int, options: LaunchOptions, port: int) -> World:
    """Return the `World` of a rank that a launcher on this machine has forked."""
    return World(
        rank=rank,
        size=options.ranks,
        local_rank=rank,
        ranks_per_node=options.ranks_per_node or options.ranks,
        host=platform.node(),
        launcher="local",
        master_address="127.0.0.1",
        master_port=port,
    )


def fork_rank(ranks: ForkedRanks, number: int, run: Callable[[], int]) -> None:
    """Fork a process that handles stop signals as a rank does, and exits with the code of `run`.

    Raises LaunchError if the process cannot be started.
    """

    def handle_signals_and_run() -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # left to the parent
        StopFlag.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return run()

    # A signal that arrives before the child has installed its handler must stay pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        ranks.fork(number, handle_signals_and_run)
    except OSError as error:
        raise LaunchError(
            f"rank {number} cannot be started ({error.strerror}): lower launch.ranks"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
