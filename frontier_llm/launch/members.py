"""The processes of a job that may hold a rank, as its coordinator sees them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol


class Members(Protocol):
    """Processes that the coordinator can count, kill, and give a rank to."""

    @property
    def patience_seconds(self) -> float:
        """How long the coordinator waits for a death after a member has lost contact."""

    def take_ended(self, *, is_suspicious: bool = False) -> Mapping[int, tuple[int, float, str]]:
        """Return the processes that have ended since the last call.

        By number of the process: its exit code, the time in seconds since 1970, and why it is taken
        for dead if its end was not seen; else an empty text. `is_suspicious` says that a node that
        does not answer has probably failed, because a member has lost contact with another one, or
        not all have come to a new generation.
        """

    def waiting(self, held: Collection[int]) -> list[int]:
        """Return the processes that run and hold no rank, unlike those of `held`."""

    def successor(
        self, number: int, held: Collection[int], *, elsewhere: bool = False
    ) -> int | None:
        """Return a process that can take the rank of one that has ended; None if there is none.

        With `elsewhere`, a process that waits is preferred to a new one on the same device.
        """

    def kill(self, numbers: Iterable[int]) -> None:
        """Kill processes; they will be among `take_ended` later."""

    def place(self, number: int) -> tuple[str, int]:
        """Return host and process id of a process."""
