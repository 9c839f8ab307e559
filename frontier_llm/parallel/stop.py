"""The request to stop: a flag that a signal raises and the training loop reads."""

import signal
from types import FrameType

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a run to stop."""


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
