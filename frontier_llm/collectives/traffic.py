"""Bytes this rank sends, counted where they are sent."""

from collections import defaultdict

from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.wire import Sent, pairs_sent, ring_sent


class Traffic:
    """Counts bytes by collective and link; `take` empties it."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self._grid, self._rank = grid, rank
        self._sent: defaultdict[str, Sent] = defaultdict(Sent)

    def ring(self, collective: str, group: tuple[int, ...], sent_bytes: float) -> None:
        """Count what this rank sends around a ring of `group`."""
        self._sent[collective] += ring_sent(self._grid, self._rank, group, sent_bytes)

    def pairs(self, collective: str, group: tuple[int, ...], sent_bytes: float) -> None:
        """Count what this rank sends in equal messages to all others of `group`."""
        self._sent[collective] += pairs_sent(self._grid, self._rank, group, sent_bytes)

    def add(self, collective: str, sent: Sent) -> None:
        """Count what somebody else sent for us (megatron's layers and schedules)."""
        self._sent[collective] += sent

    def take(self) -> dict[str, Sent]:
        """Return the counts since the last call and start anew."""
        sent, self._sent = dict(self._sent), defaultdict(Sent)
        return sent
