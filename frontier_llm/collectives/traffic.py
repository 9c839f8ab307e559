"""Counts the bytes that this rank sends. Every collective of this package calls it."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from frontier_llm.geometry.grid import Grid, Level
from frontier_llm.geometry.wire import Sent

SplitByLink = Callable[[Grid, int, tuple[int, ...], Any], Sent]
"""Splits the bytes that a rank sends to a group by the level of the links that they cross."""


class Traffic:
    """Counts bytes per collective, by the level of the links that they cross.

    A second count has the bytes that would have been sent without quantisation.
    """

    def __init__(self, grid: Grid, rank: int) -> None:
        self._grid, self._rank = grid, rank
        self._sent: defaultdict[str, Sent] = defaultdict(Sent)
        self._unquantised: defaultdict[str, Sent] = defaultdict(Sent)

    def count(
        self,
        split: SplitByLink,
        collective: str,
        group: tuple[int, ...],
        sent_bytes: Any,
        unquantised_bytes: Any = None,
    ) -> None:
        """Count bytes that this rank sends to a group.

        Args:
            split: `ring_sent`, `pairs_sent` or `unequal_sent` of geometry/wire.py, which says how
                the bytes are sent, and what `sent_bytes` are.
            unquantised_bytes: what would be sent in the compute dtype; None if the same.
        """
        if unquantised_bytes is None:
            unquantised_bytes = sent_bytes
        self._sent[collective] += split(self._grid, self._rank, group, sent_bytes)
        self._unquantised[collective] += split(self._grid, self._rank, group, unquantised_bytes)

    def add(self, collective: str, sent: Sent) -> None:
        """Count bytes by the level of the links that they crossed."""
        self._sent[collective] += sent
        self._unquantised[collective] += sent

    def take(self) -> dict[str, Sent]:
        """Return the bytes sent since the last call, by collective, and reset them."""
        sent, self._sent = dict(self._sent), defaultdict(Sent)
        return sent

    def take_unquantised(self) -> dict[str, Sent]:
        """Return the bytes that would have been sent unquantised, by collective; reset them."""
        sent, self._unquantised = dict(self._unquantised), defaultdict(Sent)
        return sent

    def level(self, group: dist.ProcessGroup) -> Level:
        """Return the farthest level of the links between the ranks of a group."""
        return self._grid.farthest_level(dist.get_process_group_ranks(group))
