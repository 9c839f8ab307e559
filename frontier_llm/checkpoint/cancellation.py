"""Lets another thread end the copying and writing of checkpoints."""

import threading

from frontier_llm.errors import CheckpointError


class Cancellation:
    """A request to give up checkpoints that are being written; threads look for it often."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Make all later calls of `check` and `sleep` raise. Any thread may call this."""
        self._event.set()

    def check(self) -> None:
        """Raise a CheckpointError if the checkpoint was given up."""
        self.sleep(0)

    def sleep(self, seconds: float) -> None:
        """Sleep, or raise a CheckpointError if the checkpoint is given up."""
        if self._event.wait(seconds):
            raise CheckpointError("it was given up, because ranks were replaced")
