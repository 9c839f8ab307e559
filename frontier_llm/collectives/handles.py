"""Handles of collectives under way: one (`Handle`), several at once (`HandleGroup`), a `Chain`."""

from collections.abc import Generator, Sequence
from typing import Any, Protocol


class Handle(Protocol):
    """A collective under way. Its buffers must not be touched until `wait()` returns."""

    def wait(self) -> Any:
        """Block until the result is available (on a GPU: make the current stream wait)."""


class HandleGroup:
    """Handles that are waited for together."""

    def __init__(self, handles: Sequence[Handle] = ()) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Wait for every handle; a second call does nothing."""
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.wait()


DONE: Handle = HandleGroup()
"""The handle of a collective that sends nothing."""

Steps = Generator[Handle, Any, None]
"""Collectives in sequence, written as one generator.

It yields each handle and receives what the handle's `wait()` returned:

    def steps():
        part = yield ReduceScatter(buffer, inside_node, ...)
        part = yield ReduceScatter(part, between_nodes, ...)
        out.copy_(part)
"""


class Chain:
    """Runs a sequence of collectives (`Steps`), one at a time; the first has started.

    Every rank must advance its chains in the same order, since each step is a collective.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._handle: Handle | None = None
        self._resume(None)

    @property
    def is_done(self) -> bool:
        """Whether all steps have finished."""
        return self._handle is None

    def advance(self) -> None:
        """Wait for the current step and start the next one."""
        if self._handle is not None:
            self._resume(self._handle.wait())

    def wait(self) -> None:
        """Run all remaining steps."""
        while not self.is_done:
            self.advance()

    def _resume(self, result: Any) -> None:
        try:
            self._handle = self._steps.send(result)
        except StopIteration:
            self._handle = None
