"""Seconds of collectives: latency and bandwidth of the links that a group of ranks crosses.

A cluster's links are levels: ranks that share a package, a node, the machine. Groups here are
lines of the grid: ranks at equal distances. A ring visits each domain of a level once, so that of
all ranks of a domain that belong to the group only one sends out at a time, and may use what all
of them together may: its bandwidth is the smallest over the levels, its steps last as long as the
slowest of them. (Patarasuk and Yuan, 2009, for rings; all-reduces of few bytes over many nodes
take a tree: Sanders, Speck and Traeff, 2009.)
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.config.cluster import ClusterConfig, LinkConfig
from frontier_llm.geometry.grid import Grid


class Cost(NamedTuple):
    """Time on a link."""

    seconds: float
    link: str
    """Which level of the network bounds it."""


@dataclass(frozen=True)
class Span:
    """A group of ranks at equal distances, and the levels that it crosses."""

    width: int
    bandwidth: float
    """Bytes a second around its ring."""
    step_seconds: float
    """Latency of one step of the ring."""
    tree_seconds: float
    """Latency of an all-reduce by trees between domains."""
    link: str
    """The level that bounds it."""

    def gather(self, ring_bytes: float, messages: float = 1) -> Cost:
        """Return the time of all-gathers or reduce-scatters in which a rank sends so much.

        Args:
            ring_bytes: that one rank sends in all.
            messages: calls; each pays the latency of all steps.
        """
        latency = messages * (self.width - 1) * self.step_seconds
        return Cost(latency + ring_bytes / self.bandwidth, self.link)

    def all_reduce(self, ring_bytes: float, messages: float = 1) -> Cost:
        """Return the time of all-reduces in which a rank sends so much; as above."""
        ring = 2 * (self.width - 1) * self.step_seconds
        latency = messages * min(ring, self.tree_seconds)
        return Cost(latency + ring_bytes / self.bandwidth, self.link)


class Network:
    """The links of a cluster, as lines of a grid of ranks see them."""

    def __init__(self, cluster: ClusterConfig, ranks_per_node: int) -> None:
        self._levels = _levels(cluster, ranks_per_node)

    def span(self, width: int, stride: int) -> Span:
        """Return the group of `width` ranks, each `stride` after the other."""
        extent = (width - 1) * stride + 1
        crossed = []
        trees, domains, below = 0.0, width, 1
        for link, size in self._levels:
            if extent > below:
                # members that share a domain of the level below share their way out of it
                together = max(1, min(width, below // stride))
                crossed.append((link, link.gb_per_second * 1e9 * link.efficiency * together))
                above = max(1, -(-extent // size)) if size else 1
                hops = math.ceil(math.log2(max(1, domains / above)))
                trees += 2 * hops * link.latency_us * 1e-6
                domains = min(domains, above)
            below = size or below
        if not crossed:
            return Span(width, math.inf, 0.0, 0.0, self._levels[0][0].name)
        slowest, bandwidth = min(crossed, key=lambda pair: pair[1])
        step = max(link.latency_us for link, _ in crossed) * 1e-6
        return Span(width, bandwidth, step, trees, slowest.name)

    def send(self, distance: int, sent_bytes: float) -> Cost:
        """Return the time to send to the rank `distance` further, while all others do the same."""
        link = next(link for link, size in self._levels if size is None or distance < size)
        bandwidth = link.gb_per_second * 1e9 * link.efficiency
        return Cost(link.latency_us * 1e-6 + sent_bytes / bandwidth, link.name)


class Lines:
    """The groups of a grid as spans."""

    def __init__(self, network: Network, grid: Grid) -> None:
        self._network, self._grid = network, grid
        self._spans: dict[tuple[int, int], Span] = {}
        self.tensor = network.span(grid.tensor, 1)

    def data(self, width: int, low: int) -> Span:
        """Return `width` data ranks at a distance of `low` data ranks."""
        key = (width, low)
        if key not in self._spans:
            self._spans[key] = self._network.span(width, low * self._grid.tensor)
        return self._spans[key]

    def is_inside_node(self, width: int, low: int) -> bool:
        """Whether such a line of data ranks stays on one node."""
        stride = low * self._grid.tensor
        return width * stride <= self._grid.ranks_per_node or width == 1

    def to_next_stage(self, sent_bytes: float) -> Cost:
        """Return the time to send to the same place of the next stage."""
        return self._network.send(self._grid.tensor * self._grid.data, sent_bytes)

    def between_ends(self, sent_bytes: float) -> Cost:
        """Return the time to send from the first stage to the same place of the last."""
        grid = self._grid
        return self._network.send(grid.tensor * grid.data * (grid.pipeline - 1), sent_bytes)


def _levels(cluster: ClusterConfig, ranks_per_node: int) -> list[tuple[LinkConfig, int | None]]:
    """Return links with the ranks that share them; where nodes are smaller, so are theirs."""
    levels: list[tuple[LinkConfig, int | None]] = []
    for link in cluster.links:
        size = None if link.ranks is None else min(link.ranks, ranks_per_node)
        if size is None or size > 1:
            levels.append((link, size))
    return levels
