"""The request to stop: by a signal to a rank or to its parent, by a file, by the job's clock."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a run to stop."""
_SAME_KEY_SECONDS = 0.2


class StopFlag:
    """Whether somebody asked this process to stop, and by which signal.

    It is the handler of SIGTERM (scancel, the launcher), SIGUSR1 (sbatch --signal=USR1@120) and,
    where nobody ignores it already, SIGINT. The loop polls it between steps and ends in order.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    @classmethod
    def install(cls) -> "StopFlag":
        """Install the flag in this process, or return the one that is installed.

        To be called from the main thread. The process's signal handler is the state: a request
        that came before the loop began is not lost.
        """
        installed = signal.getsignal(signal.SIGTERM)
        if isinstance(installed, cls):
            return installed
        flag = cls()
        for number in REQUESTS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, flag)
        return flag

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._number is not None

    @property
    def reason(self) -> str:
        """Name of the signal, for messages; empty while there was none."""
        return "" if self._number is None else signal.Signals(self._number).name

    @staticmethod
    def retire() -> None:
        """Ignore requests from here on: the process is about to exit with the code it has.

        srun ends a step when its first task leaves with a code; that signal must not turn the
        code of the others into another one.
        """
        for number in REQUESTS:
            signal.signal(number, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, as its handler."""
        self._number = number


class StopRequest:
    """Whether a run should end in order: for a signal, a STOP file, or the end of the Slurm job.

    Every rank hears signals. The file and the clock are looked at by rank 0 alone; the step's
    reduction tells the others.
    """

    def __init__(
        self, flag: StopFlag, stop_file: Path | None = None, deadline: "Deadline | None" = None
    ) -> None:
        """Combine what there is.

        Args:
            flag: of this process's signals.
            stop_file: rank 0 only: a file that asks for a stop by being there; it is removed when
                it is seen, so that the run can go on later.
            deadline: rank 0 only: of the job.
        """
        self._flag, self._file, self._deadline = flag, stop_file, deadline
        self._reason = ""

    def look(self) -> bool:
        """Look whether to stop; to be called once a step, whose length the deadline learns so."""
        self._reason = self._reason or self._flag.reason or self._seen_file() or self._near_end()
        return bool(self._reason)

    @property
    def reason(self) -> str:
        """Name of the signal, or what else it was; empty while nothing was seen."""
        return self._reason or self._flag.reason

    def _seen_file(self) -> str:
        if self._file is None or not self._file.exists():
            return ""
        self._file.unlink(missing_ok=True)
        return f"file {self._file.name}"

    def _near_end(self) -> str:
        return self._deadline.look() if self._deadline is not None else ""


class Deadline:
    """The end of a Slurm job, and how long before it a run should stop."""

    def __init__(self, end_seconds: float, margin_seconds: float) -> None:
        """Note the end.

        Args:
            end_seconds: when Slurm ends the job, by the clock of the host.
            margin_seconds: what saving and leaving may take.
        """
        self._end, self._margin = end_seconds, margin_seconds
        self._last: float | None = None
        self._longest = 0.0

    def look(self) -> str:
        """Say how little is left if it is too little for two more steps; else nothing."""
        now = time.time()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        left = self._end - now
        if left > self._margin + 2 * self._longest:
            return ""
        return f"{max(0.0, left) / 60:.1f} minutes left of the Slurm job"


class Requests:
    """The requests that came to the parent of ranks while it waits for them."""

    def __init__(self) -> None:
        self._interrupts: list[float] = []
        self._stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Requests":
        self._before = {number: signal.signal(number, self._note) for number in REQUESTS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        if number == signal.SIGINT:
            self._interrupts.append(time.monotonic())

    def take_stop(self) -> bool:
        """Whether a request has come that was not yet taken."""
        stop, self._stop = self._stop, False
        return stop

    @property
    def is_impatient(self) -> bool:
        """Whether a second Ctrl-C came, and not the first one twice (make hands it on too)."""
        times = self._interrupts
        return len(times) > 1 and times[-1] - times[0] > _SAME_KEY_SECONDS
