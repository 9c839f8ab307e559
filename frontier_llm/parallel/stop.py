"""The request to stop: a flag that a signal raises, in a rank and in the parent of ranks."""

import signal
import time
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

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, as its handler."""
        self._number = number


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
