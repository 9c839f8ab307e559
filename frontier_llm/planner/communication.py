"""Seconds of collectives, from latency and bandwidth of the links that a group of ranks crosses.

The links of a cluster are levels: between ranks of a package, of a node, of the machine. A domain
of a level is a set of ranks connected by its links. Groups are ranks at equal distances. A ring
enters and leaves each domain once, so the traffic that leaves a domain is that of one rank. It can
use the links of all the group's ranks in the domain, so their bandwidths add up. The bandwidth of
the ring is the smallest over the levels, and each of its steps takes the latency of the slowest
level (Patarasuk and Yuan, 2009).
All-reduces of few bytes over many nodes use a tree (Sanders, Speck and Traeff, 2009).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.config.cluster import ClusterConfig, LinkConfig
from frontier_llm.geometry.grid import Grid


class Cost(NamedTuple):
    """Seconds of communication."""

    seconds: float
    link: str
    """Name of the link that limits it."""


@dataclass(frozen=True)
class Span:
    """A group of ranks at equal distances, with the speed of the links that it crosses."""

    width: int
    bandwidth: float
    """Bytes per second around the group's ring."""
    step_seconds: float
    """Latency of one step around the ring."""
    tree_seconds: float
    """Latency of an all-reduce that uses trees between domains."""
    link: str
    """Name of the link that limits the ring's bandwidth."""

    def gather(self, ring_bytes: float, messages: float = 1) -> Cost:
        """Return the cost of all-gathers or reduce-scatters.

        Args:
            ring_bytes: bytes that one rank sends in all.
            messages: number of calls; each has the latency of all steps.
        """
        latency = messages * (self.width - 1) * self.step_seconds
        return Cost(latency + ring_bytes / self.bandwidth, self.link)

    def all_reduce(self, ring_bytes: float, messages: float = 1) -> Cost:
        """Return the cost of all-reduces; arguments as for `gather`."""
        ring = 2 * (self.width - 1) * self.step_seconds
        latency = messages * min(ring, self.tree_seconds)
        return Cost(latency + ring_bytes / self.bandwidth, self.link)


class Network:
    """The links of a cluster, by the ranks that they connect."""

    def __init__(self, cluster: ClusterConfig, ranks_per_node: int) -> None:
        self._levels = _levels(cluster, ranks_per_node)

    def span(self, width: int, stride: int) -> Span:
        """Return a group of `width` ranks at distances of `stride`."""
        extent = (width - 1) * stride + 1
        crossed = []
        tree_seconds, lower_domains, lower_size = 0.0, width, 1
        for link, size in self._levels:
            if extent > lower_size:
                # ranks of the group in one domain of the level below; together they use their links
                together = max(1, min(width, lower_size // stride))
                crossed.append((link, link.gb_per_second * 1e9 * link.efficiency * together))
                domains = max(1, -(-extent // size)) if size else 1
                hops = math.ceil(math.log2(max(1, lower_domains / domains)))
                tree_seconds += 2 * hops * link.latency_us * 1e-6
                lower_domains = min(lower_domains, domains)
            lower_size = size or lower_size
        if not crossed:
            return Span(width, math.inf, 0.0, 0.0, self._levels[0][0].name)
        slowest, bandwidth = min(crossed, key=lambda pair: pair[1])
        step = max(link.latency_us for link, _ in crossed) * 1e-6
        return Span(width, bandwidth, step, tree_seconds, slowest.name)

    def send(self, distance: int, sent_bytes: float) -> Cost:
        """Return the cost of sending to the rank at `distance` while all ranks do the same."""
        link = next(link for link, size in self._levels if size is None or distance < size)
        bandwidth = link.gb_per_second * 1e9 * link.efficiency
        return Cost(link.latency_us * 1e-6 + sent_bytes / bandwidth, link.name)


class GridGroups:
    """The groups of a grid of ranks, with the cost of their communication."""

    def __init__(self, network: Network, grid: Grid) -> None:
        self._network, self._grid = network, grid
        self._spans: dict[tuple[int, int], Span] = {}
        self.tensor = network.span(grid.tensor, 1)

    def data(self, width: int, low: int) -> Span:
        """Return a group of `width` data ranks at distances of `low` data ranks."""
        key = (width, low)
        if key not in self._spans:
            self._spans[key] = self._network.span(width, low * self._grid.tensor)
        return self._spans[key]

    def is_inside_node(self, width: int, low: int) -> bool:
        """Whether a group of `width` data ranks at distances of `low` stays on one node."""
        stride = low * self._grid.tensor
        return width * stride <= self._grid.ranks_per_node or width == 1

    def to_next_stage(self, sent_bytes: float) -> Cost:
        """Return the cost of sending from one stage to the next."""
        return self._network.send(self._grid.tensor * self._grid.data, sent_bytes)

    def between_ends(self, sent_bytes: float) -> Cost:
        """Return the cost of sending from the first stage to the last."""
        grid = self._grid
        return self._network.send(grid.tensor * grid.data * (grid.pipeline - 1), sent_bytes)


def _levels(cluster: ClusterConfig, ranks_per_node: int) -> list[tuple[LinkConfig, int | None]]:
    """Return each link with the ranks per domain of its level; None = the whole machine.

    Levels inside a node have at most the ranks of a node; levels of one rank are left out.
    """
    levels: list[tuple[LinkConfig, int | None]] = []
    for link in cluster.links:
        size = None if link.ranks is None else min(link.ranks, ranks_per_node)
        if size is None or size > 1:
            levels.append((link, size))
    return levels
