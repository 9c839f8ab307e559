"""Bytes this rank sends, counted where they are sent."""

from collections import defaultdict
from collections.abc import Callable

import torch.distributed as dist

from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.wire import Sent, pairs_sent, ring_sent

Attribute = Callable[[Grid, int, tuple[int, ...], float], Sent]


class Traffic:
    """Counts bytes by collective and link; `take` empties it."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self._grid, self._rank = grid, rank
        self._sent: defaultdict[str, Sent] = defaultdict(Sent)
        self._unquantised: defaultdict[str, Sent] = defaultdict(Sent)

    def ring(
        self,
        collective: str,
        group: tuple[int, ...],
        sent_bytes: float,
        unquantised_bytes: float | None = None,
    ) -> None:
        """Count what this rank sends around a ring of `group`.

        Args:
            collective: its name.
            group: ranks, in the ring's order.
            sent_bytes: really sent.
            unquantised_bytes: what it would be if the elements travelled as they are computed
                with; absent = the same.
        """
        self._count(ring_sent, collective, group, sent_bytes, unquantised_bytes)

    def pairs(
        self,
        collective: str,
        group: tuple[int, ...],
        sent_bytes: float,
        unquantised_bytes: float | None = None,
    ) -> None:
        """Count what this rank sends in equal messages to all others; arguments as for a ring."""
        self._count(pairs_sent, collective, group, sent_bytes, unquantised_bytes)

    def add(self, collective: str, sent: Sent) -> None:
        """Count what somebody else sent for us (megatron's layers and schedules)."""
        self._sent[collective] += sent
        self._unquantised[collective] += sent

    def take(self) -> dict[str, Sent]:
        """Return the counts since the last call and start anew."""
        sent, self._sent = dict(self._sent), defaultdict(Sent)
        return sent

    def take_unquantised(self) -> dict[str, Sent]:
        """Return what would have been sent without quantisation, since the last call."""
        sent, self._unquantised = dict(self._unquantised), defaultdict(Sent)
        return sent

    def nodes(self, group: dist.ProcessGroup) -> list[int]:
        """Return the node of each rank of a group."""
        return [self._grid.node(rank) for rank in dist.get_process_group_ranks(group)]

    def _count(
        self,
        attribute: Attribute,
        collective: str,
        group: tuple[int, ...],
        sent_bytes: float,
        unquantised_bytes: float | None,
    ) -> None:
        plain = sent_bytes if unquantised_bytes is None else unquantised_bytes
        self._sent[collective] += attribute(self._grid, self._rank, group, sent_bytes)
        self._unquantised[collective] += attribute(self._grid, self._rank, group, plain)
