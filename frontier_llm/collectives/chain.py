"""Collectives that follow one another, written as one function.

A chain's steps are a generator that yields each handle and is given back what its `wait()`
returned:

    def steps():
        part = yield ReduceScatter(whole, inside_node, ...)
        part = yield ReduceScatter(part, between_nodes, ...)
        out.copy_(part)
"""

from collections.abc import Generator
from typing import Any

from frontier_llm.collectives.handle import Handle

Steps = Generator[Handle, Any, None]


class Chain:
    """Steps of which one is under way at a time.

    Every rank must advance its chains in the same order: each step is a collective.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._handle: Handle | None = None
        self._continue(None)

    @property
    def is_done(self) -> bool:
        """Whether the last step has been waited for."""
        return self._handle is None

    def advance(self) -> None:
        """Wait for the step under way and start the next one."""
        if self._handle is not None:
            self._continue(self._handle.wait())

    def wait(self) -> None:
        """Go through all steps."""
        while not self.is_done:
            self.advance()

    def _continue(self, result: Any) -> None:
        try:
            self._handle = self._steps.send(result)
        except StopIteration:
            self._handle = None
