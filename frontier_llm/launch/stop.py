"""Requests to stop a run: a signal to a rank or to its parent, a file, or the job's time limit.

The training loop asks `StopRequest` once per step; launcher.py uses `ParentSignals`.
"""

import errno
import os
import signal
import termios
import time
from pathlib import Path
from types import FrameType
from typing import Any

from frontier_llm.config.run import RunConfig
from frontier_llm.launch.slurm import end_of_job
from frontier_llm.launch.world import World

STOP_FILE = "STOP"
"""A file of this name in the run directory makes the run save and stop."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a run to save and stop."""
GRACE_SECONDS = 120.0
"""How long a rank waits at most for Slurm to kill it; Slurm usually kills it much earlier."""
_SAME_KEY_SECONDS = 0.2
"""Two SIGINTs within this time come from one Ctrl-C: programs such as make forward the signal."""


class StopFlag:
    """Records whether this process received a stop signal, and which one.

    The object is the handler of SIGTERM (sent by scancel and by the launcher), of SIGUSR1 (sent by
    Slurm with sbatch --signal=USR1@120), of SIGINT and of SIGHUP (sent when the terminal is
    closed). The training loop polls it between steps.
    """

    def __init__(self) -> None:
        self._signals: list[int] = []

    @classmethod
    def install(cls) -> "StopFlag":
        """Install a flag in this process, or return the one that is installed.

        Must be called from the main thread. The installed handler holds the state, so a signal
        that arrives before the loop starts is not lost.
        """
        installed = signal.getsignal(signal.SIGTERM)
        if isinstance(installed, cls):
            return installed
        flag = cls()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP under nohup
                signal.signal(number, flag)
        return flag

    @property
    def requested(self) -> bool:
        """Whether a stop signal has arrived."""
        return bool(self._signals)

    @property
    def reason(self) -> str:
        """Name of the first signal, for messages; empty if none has arrived.

        The ranks of one machine ignore Ctrl-C, and the launcher then sends them SIGTERM.
        """
        names: dict[int, str] = {
            signal.SIGINT: "Ctrl-C",
            signal.SIGTERM: "Ctrl-C or SIGTERM",
            signal.SIGHUP: "the terminal was closed: SIGHUP",
        }
        return next((names.get(n, signal.Signals(n).name) for n in self._signals), "")

    @property
    def is_terminated(self) -> bool:
        """Whether SIGTERM has arrived, perhaps after another signal."""
        return signal.SIGTERM in self._signals

    @staticmethod
    def ignore_signals() -> None:
        """Ignore stop signals from now on, so that they cannot change this process's exit code.

        srun sends SIGTERM to the remaining tasks when its first task exits with a non-zero code.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record the signal."""
        self._signals.append(number)
        _leave_closed_terminal()


class StopRequest:
    """Whether a run should save and stop: after a signal, a STOP file, or near the job's end.

    Every rank notices its own signals; only rank 0 notices the file and the time limit. At the end
    of each step, an all-reduce tells every rank whether any rank has a request. The file is removed
    when it is noticed, so that it does not stop the resumed run.
    """

    def __init__(
        self, flag: StopFlag, stop_file: Path | None = None, deadline: "Deadline | None" = None
    ) -> None:
        self._flag, self._file, self._deadline = flag, stop_file, deadline
        self._reason = ""

    @classmethod
    def of_rank(cls, config: RunConfig, world: World) -> "StopRequest":
        """Return the object of a rank.

        Every rank notices signals. Rank 0 also notices the file `STOP` in the run directory and,
        under Slurm, that the time limit of the job ends in `launch.stop_minutes`.
        """
        flag, margin = StopFlag.install(), config.launch.stop_minutes * 60
        if world.rank:
            return cls(flag)
        end = end_of_job(os.environ) if margin else None
        deadline = None if end is None else Deadline(end, margin)
        return cls(flag, Path(config.run.dir) / STOP_FILE, deadline)

    def look(self) -> bool:
        """Return whether to stop.

        Must be called once per step: the deadline measures the length of a step between two calls.
        """
        self._reason = self._reason or self._flag.reason
        if self._file is not None and self._file.exists():
            self._reason = self._reason or f"file {self._file.name}"
        if self._deadline is not None:
            self._reason = self._reason or self._deadline.look()
        return bool(self._reason)

    @property
    def reason(self) -> str:
        """Name of the signal or file, or the time left; empty if there is no request."""
        return self._reason or self._flag.reason

    def withdraw(self) -> None:
        """Delete the file, if there is one: the states are saved, and the run ends."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class Deadline:
    """The end of a Slurm job, and how long before it a run should stop."""

    def __init__(self, end_seconds: float, margin_seconds: float) -> None:
        """Take the end of the job since 1970, and the time for a checkpoint, in seconds."""
        self._end, self._margin = end_seconds, margin_seconds
        self._last_call: float | None = None
        self._longest_step = 0.0

    def look(self) -> str:
        """Return the time left, as text, if it is too short for two more steps; else empty text.

        The length of a step is the longest time between two calls so far.
        """
        now = time.time()
        if self._last_call is not None:
            self._longest_step = max(self._longest_step, now - self._last_call)
        self._last_call = now
        left = self._end - now
        if left > self._margin + 2 * self._longest_step:
            return ""
        return f"{max(0.0, left) / 60:.1f} minutes left of the Slurm job"


class ParentSignals:
    """The stop signals that arrive at the parent of the ranks while it waits for them."""

    def __init__(self) -> None:
        self._interrupts: list[float] = []  # times of SIGINT
        self._stop = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "ParentSignals":
        self._previous_handlers = {
            number: signal.signal(number, self._record)
            for number in STOP_SIGNALS
            # Under nohup SIGHUP stays ignored. SIGINT, which shells let background programs ignore,
            # is needed: `make` forwards it
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        _leave_closed_terminal()
        if number == signal.SIGINT:
            self._interrupts.append(time.monotonic())

    def take_stop(self) -> bool:
        """Return whether a signal has arrived since the last call."""
        stop, self._stop = self._stop, False
        return stop

    @property
    def second_interrupt(self) -> bool:
        """Whether Ctrl-C was pressed twice."""
        times = self._interrupts
        return len(times) > 1 and times[-1] - times[0] > _SAME_KEY_SECONDS


def _leave_closed_terminal() -> None:
    """Discard output to a terminal that is gone: it would fail with EIO before states are saved."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def wait_for_slurm(flag: StopFlag) -> None:
    """Wait until Slurm kills this rank, if Slurm has sent SIGTERM to preempt or cancel the job.

    If the ranks of a preempted job exited by themselves, Slurm would count the job as failed and
    would not requeue it.
    """
    if flag.is_terminated:
        time.sleep(GRACE_SECONDS)


def stop_message(step: int, reason: str, run_dir: str, is_saved: bool) -> str:
    """Return the last message of a run that was asked to stop after a step.

    The reason is empty if only another rank was asked.
    """
    reason = reason or "another rank was asked to stop"
    advice = f"to continue, repeat the command with run.dir={run_dir}"
    saved = advice if is_saved else "nothing is saved (checkpoint=off)"
    return f"stopped after step {step} ({reason}); {saved}"
