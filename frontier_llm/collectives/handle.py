"""Something under way that can be waited for."""

from typing import Any, Protocol


class Handle(Protocol):
    """A collective under way; its buffers are not to be touched until `wait()` returns."""

    def wait(self) -> Any:
        """Block until the result is there (on a GPU: make the current stream wait)."""


class _Done:
    def wait(self) -> None:
        """Return at once."""


DONE: Handle = _Done()
