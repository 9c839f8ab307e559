"""One start of a training run in forked processes, which can be killed; and a tiny run to start."""

import importlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from benchmarks.harness import ROOT
from frontier_llm.cli.main import main as run_program
from frontier_llm.errors import TrainingError

OVERRIDES = (
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocabulary=300", "data=text",
    "data.vocabulary=300", "data.sequence_length=32", "data.global_batch=4", "data.micro_batch=1",
    "launch.ranks=2", "parallel.pipeline=1", "sharding=zero1", "precision=fp32",
    "checkpoint=lazy", "checkpoint.every_steps=1", "run.resume=auto", "plan=off",
    "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1", "trainer.sample_tokens=0",
    "telemetry.wandb=off", "telemetry.progress=false",
)  # fmt: skip
"""Settings of a tiny run."""
Target = Literal["all ranks", "one rank", "one node", "the parent"]
"""Processes that a kill may hit."""
POLL_SECONDS = 0.002
"""Interval at which the state of processes is read."""
_ENDED = ("Z", "X")
"""States in /proc of processes that have ended; a zombie's exit code has not been read yet."""


def train(overrides: Sequence[str]) -> int:
    """Train as the command line does; return the exit code."""
    return run_program(["train", *overrides])


def import_training() -> None:
    """Import what training needs, once, before the forks."""
    for module in ("frontier_llm.cli.train", "frontier_llm.trainer.assemble"):
        importlib.import_module(module)


def corpus_of(folder: Path) -> tuple[str, str]:
    """Write the source code of this package as one text to train on; return the overrides."""
    path = folder / "text.txt"
    sources = sorted((ROOT / "frontier_llm").rglob("*.py"))
    path.write_text("\n\n".join(source.read_text() for source in sources))
    return f"data.path={path}", f"data.directory={folder}/corpora"


class ForkedRun:
    """A process that trains and the ranks that it forks, in their own session (see setsid(2)).

    `train` trains with the given overrides, all modules being imported already; `log` receives the
    output of all processes.
    """

    def __init__(
        self, train: Callable[[Sequence[str]], int], overrides: Sequence[str], log: Path
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.start_seconds = time.time()
        self._log = log
        self.pid = os.fork()
        self._exit_code: int | None = None
        if not self.pid:
            _run(train, overrides, log)

    def exit_code(self) -> int | None:
        """Return the exit code of the first process; None while it runs."""
        if self._exit_code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def kill(self, target: Target, random_: random.Random) -> Target:
        """Send SIGKILL; return the target, which is the parent if no rank has been forked yet."""
        ranks = self._ranks()
        if target == "the parent" or not ranks:
            kill_processes([self.pid])
            return "the parent"
        kill_processes(ranks if target == "all ranks" else [random_.choice(ranks)])
        return target

    def kill_node(self, node: int) -> Target:
        """Send SIGKILL to one of two nodes, or to the parent if none of its ranks runs."""
        forked = sorted(self._ranks())  # the first one holds the ranks' store
        ranks = forked[2 * node + 1 : 2 * node + 3]
        kill_processes(ranks or [self.pid])
        return "one node" if ranks else "the parent"

    def wait(self, limit_seconds: float) -> float | None:
        """Wait until all processes of the run have ended.

        Returns:
            Seconds until then; None if processes still ran after the limit, and were killed.
        """
        start = time.monotonic()
        while self.exit_code() is None or self.processes():
            if time.monotonic() - start > limit_seconds:
                self.end()
                return None
            time.sleep(POLL_SECONDS)
        return time.monotonic() - start

    def wait_for_end(self) -> None:
        """Wait until the first process has ended by itself."""
        while self.exit_code() is None:
            time.sleep(POLL_SECONDS)

    def finish(self, name: str) -> None:
        """Wait for the end of a run that is not killed.

        Raises:
            TrainingError: the run failed; the message has the end of its output.
        """
        try:
            self.wait_for_end()
        finally:
            self.end()
        if self._exit_code:
            raise TrainingError(f"{name} failed:\n{self._log.read_text()[-4000:]}")

    def end(self) -> None:
        """Kill all processes that still run."""
        kill_processes(self.processes())
        if self._exit_code is None:
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _ranks(self) -> list[int]:
        """Return the processes that the first one has forked."""
        return [pid for pid in self.processes() if pid != self.pid]

    def processes(self) -> list[int]:
        """Return the ids of the processes of the session that have not ended."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                try:
                    text = (path / "stat").read_text()
                except OSError:
                    continue  # the process has just ended
                # the fields after the name in brackets: state, parent, group, session
                state, _, _, session = text.rpartition(")")[2].split()[:4]
                if int(session) == self.pid and state not in _ENDED:
                    found.append(int(path.name))
        return found


def kill_processes(pids: Iterable[int]) -> set[int]:
    """Send SIGKILL to processes; return the ids of those that ran."""
    killed = set()
    for pid in pids:
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return killed


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
