"""Something under way that can be waited for."""

from collections.abc import Sequence
from typing import Any, Protocol


class Handle(Protocol):
    """A collective under way; its buffers are not to be touched until `wait()` returns."""

    def wait(self) -> Any:
        """Block until the result is there (on a GPU: make the current stream wait)."""


class Together:
    """Several handles as one; none of them is done at once."""

    def __init__(self, handles: Sequence[Handle] = ()) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Wait for all of them, once."""
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.wait()


DONE: Handle = Together()
