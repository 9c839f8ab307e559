"""One start of a training run in forked processes, which can be killed."""

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

Target = Literal["all ranks", "one rank", "the parent"]
TARGETS: tuple[Target, ...] = ("all ranks", "one rank", "the parent")
"""Processes that a kill may hit."""
POLL_SECONDS = 0.002
"""Interval at which the state of processes is read."""
_ENDED = ("Z", "X")
"""States in /proc of processes that have ended; a zombie's exit code has not been read yet."""


class ForkedRun:
    """A process that trains and the ranks that it forks, in their own session (see setsid(2))."""

    def __init__(
        self, train: Callable[[Sequence[str]], int], overrides: Sequence[str], log: Path
    ) -> None:
        """Fork the first process.

        Args:
            train: trains with the given overrides; all modules are imported already.
            overrides: the command line.
            log: file that receives the output of all processes.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self.start_seconds = time.time()
        self._pid = os.fork()
        self._exit_code: int | None = None
        if not self._pid:
            _run(train, overrides, log)

    def exit_code(self) -> int | None:
        """Return the exit code of the first process; None while it runs."""
        if self._exit_code is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def kill(self, target: Target, random_: random.Random) -> Target:
        """Send SIGKILL; return the target, which is the parent if no rank has been forked yet.

        Args:
            target: which processes to kill.
            random_: chooses the rank if the target is one rank.
        """
        ranks = self._ranks()
        if target == "the parent" or not ranks:
            os.kill(self._pid, signal.SIGKILL)
            return "the parent"
        for rank in ranks if target == "all ranks" else [random_.choice(ranks)]:
            try:
                os.kill(rank, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the rank has just ended by itself
        return target

    def kill_ranks(self, ranks: range) -> None:
        """Send SIGKILL to some ranks, in the order in which they were forked."""
        for pid in sorted(self._ranks())[ranks.start : ranks.stop]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the rank has just ended by itself

    def wait(self, limit_seconds: float) -> float | None:
        """Wait until all processes of the run have ended.

        Returns:
            Seconds until then; None if processes still ran after the limit, and were killed.
        """
        start = time.monotonic()
        while self.exit_code() is None or self._session():
            if time.monotonic() - start > limit_seconds:
                self.end()
                return None
            time.sleep(POLL_SECONDS)
        return time.monotonic() - start

    def wait_for_end(self) -> None:
        """Wait until the first process has ended by itself."""
        while self.exit_code() is None:
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Kill all processes that still run."""
        for pid in self._session():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self._exit_code is None:
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _ranks(self) -> list[int]:
        """Return the processes that the first one has forked."""
        return [pid for pid in self._session() if pid != self._pid]

    def _session(self) -> list[int]:
        """Return the processes of the session that have not ended."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                try:
                    text = (path / "stat").read_text()
                except OSError:
                    continue  # the process has just ended
                # the fields after the name in brackets: state, parent, group, session
                state, _, _, session = text.rpartition(")")[2].split()[:4]
                if int(session) == self._pid and state not in _ENDED:
                    found.append(int(path.name))
        return found


def _run(train: Callable[[Sequence[str]], int], overrides: Sequence[str], log: Path) -> None:
    """Run as the first process, which never returns."""
    exit_code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        exit_code = train(overrides)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
