"""Chooses the processes that take the ranks of dead ones, and moves ranks to other nodes.

If the ranks of a node write files together on its disk or in its memory, they only move together.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from frontier_llm.errors import print_error
from frontier_llm.launch import failure


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


class Successors:
    """Gives ranks to processes. A roster has, by rank, the process that holds it."""

    def __init__(self, members: Members, together: int) -> None:
        """Move `together` neighbouring ranks together; 1: each rank alone."""
        self._members, self._together = members, together
        self._moving: set[int] = set()  # processes whose ranks go to another node

    def move(self, ranks: Iterable[int], roster: Sequence[int]) -> None:
        """Kill the processes of ranks and of those that move with them, if others can take over."""
        for block in self._blocks(ranks, roster):
            if self._waiting_on_one_host(roster):
                self._move_block(block, roster)
            elif len(block) == 1:
                print_error(
                    f"no process waits that could take the place of rank {block[0]} "
                    "(recovery.spares): it stays"
                )
            else:
                print_error(
                    f"no node waits that could take over ranks {block[0]} to {block[-1]} "
                    "(recovery.spares): they stay"
                )

    def swap(self, rank: int, roster: Sequence[int]) -> None:
        """Kill the process of a rank, which moves if processes wait, and else gets a new one."""
        if self._waiting_on_one_host(roster):
            self._move_block(self._block(rank, roster), roster)
        else:
            self._members.kill([roster[rank]])

    def leave_lost_node(self, rank: int, roster: Sequence[int]) -> None:
        """Move a rank whose node is lost, and the ranks that move with it if others can take over.

        A node counts as lost if one of its tasks does not answer.
        """
        self._moving.add(roster[rank])
        if self._waiting_on_one_host(roster):
            self._move_block(self._block(rank, roster), roster)

    def have_ended(self, dead: Iterable[int], roster: Sequence[int]) -> bool:
        """Return whether all processes whose ranks move are among the dead ranks."""
        return self._moving.isdisjoint({n for rank, n in enumerate(roster) if rank not in dead})

    def assign(self, dead: Mapping[int, failure.Failure], roster: list[int]) -> list[int]:
        """Give the ranks of dead processes to others, and print which; return ranks without one."""
        former, missing = {rank: roster[rank] for rank in dead}, []
        self._assign_blocks(dead, roster)
        for rank, failed in sorted(dead.items()):
            cause = failure.in_one_line(failed)
            if roster[rank] == former[rank]:
                moves = former[rank] in self._moving
                number = self._members.successor(former[rank], roster, elsewhere=moves)
                if number is None:
                    missing.append(rank)
                    print_error(f"{cause}; no process waits that could take its place")
                    continue
                roster[rank] = number
            print_error(f"{cause}; process {roster[rank]} takes its place")
        return missing

    def _assign_blocks(self, dead: Mapping[int, failure.Failure], roster: list[int]) -> None:
        """Give ranks that move to processes that wait, those of a block to those of one node."""
        for block in self._blocks(dead, roster):
            moves = not self._moving.isdisjoint(roster[rank] for rank in block)
            if moves and set(block) <= set(dead):
                for rank, number in zip(block, self._waiting_on_one_host(roster), strict=False):
                    roster[rank] = number

    def _move_block(self, block: Sequence[int], roster: Sequence[int]) -> None:
        numbers = {roster[rank] for rank in block} - self._moving
        self._moving |= numbers
        self._members.kill(numbers)

    def _waiting_on_one_host(self, roster: Sequence[int]) -> Sequence[int]:
        """Return as many processes that wait on one host as move together; empty if none has them.

        The oldest processes are chosen first: those on a node that ranks have left are new.
        """
        by_host = defaultdict(list)
        for number in sorted(self._members.waiting(roster)):
            by_host[self._members.place(number)[0]].append(number)
        for numbers in by_host.values():
            if len(numbers) >= self._together:
                return numbers[: self._together]
        return ()

    def _blocks(self, ranks: Iterable[int], roster: Sequence[int]) -> list[Sequence[int]]:
        first_ranks = {self._block(rank, roster)[0] for rank in ranks}
        return [self._block(first, roster) for first in sorted(first_ranks)]

    def _block(self, rank: int, roster: Sequence[int]) -> Sequence[int]:
        first = rank - rank % self._together
        return range(first, min(first + self._together, len(roster)))
