"""The forked ranks as their parent sees them."""

import os
import signal
import time

POLL_SECONDS = 0.02
"""Between two looks at the ranks."""
_NO_FAILURE = (0, 3)


class Children:
    """The forked ranks: who runs, who ended and how."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.ended: dict[int, tuple[int, float]] = {}
        self.sent: dict[int, set[int]] = {}

    def poll(self) -> None:
        """Notice who ended, with the exit code and a time at which it still ran."""
        for rank, pid in list(self.running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                self.ended[rank] = code, time.time() - POLL_SECONDS
                del self.running[rank]

    def failed(self) -> bool:
        """Whether a rank has ended otherwise than well or on request."""
        return any(code not in _NO_FAILURE for code, _ in self.ended.values())

    def died_of_ours(self, rank: int) -> bool:
        """Whether a signal that the parent sent ended this rank."""
        return -self.ended[rank][0] in self.sent.get(rank, ())

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that still runs."""
        for rank, pid in self.running.items():
            os.kill(pid, number)
            self.sent.setdefault(rank, set()).add(number)

    def kill(self) -> None:
        """Kill every rank that still runs, and wait until it is gone."""
        self.send(signal.SIGKILL)
        while self.running:
            self.poll()
            time.sleep(POLL_SECONDS / 10)
