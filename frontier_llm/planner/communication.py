"""Predict seconds of collectives from latency and bandwidth of the links between ranks.

The links of a cluster form levels: inside a package, inside a node, and between nodes. A domain of
a level is a set of ranks that the links of this level connect, for example the ranks of a node. The
ranks of a group are at equal distances, for example every eighth rank.

A ring enters and leaves each domain once, so only the bytes of one rank leave a domain. They can
use the links of all ranks of the group in this domain, so the bandwidths of these links add up. The
slowest level limits the bandwidth of the ring. Each step of the ring takes the latency of the
slowest level (Patarasuk and Yuan, 2009). All-reduces of few bytes over many nodes use a tree
(Sanders, Speck and Traeff, 2009). All-reduces of many bytes add up inside a domain before its ranks
send their parts of the sum to other domains, which are fewer bytes than a ring sends if there are
few domains.

In an exchange every rank sends a message to every other rank of the group. Each rank then sends all
its bytes for other domains over its own link, so that many more bytes leave a domain than in a ring
if the domain has several ranks of the group.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from frontier_llm.config.cluster import ClusterConfig, Collective, CollectiveSpeed, LinkConfig
from frontier_llm.geometry.grid import Grid, Level


class Cost(NamedTuple):
    """Seconds of some communication."""

    seconds: float
    link: str
    """Name of the link that limits the speed, as in the cluster file."""


@dataclass(frozen=True)
class Span:
    """A group of ranks at equal distances, with the speed of the links that it crosses."""

    width: int
    bandwidth: float
    """Bytes per second around the group's ring."""
    all_reduce_bandwidth: float
    """The same for all-reduces, which add up inside domains before they cross to others."""
    exchange_bandwidth: float
    """Bytes per second of a rank in an exchange of messages between all pairs of ranks."""
    step_seconds: float
    """Latency of one step around the ring."""
    tree_seconds: float
    """Latency of an all-reduce that uses trees between domains."""
    start_seconds: float
    """Seconds of a call in addition to the latency of its steps."""
    link: str
    """Name of the link that limits the ring's bandwidth."""
    measured: Mapping[Collective, CollectiveSpeed] = field(default_factory=dict)
    """Measured speeds of the library's collectives; empty if the ring crosses several levels."""

    def collective(self, kind: Collective, ring_bytes: float, messages: float = 1) -> Cost:
        """Return the cost of all-gathers or reduce-scatters, as measured if they were measured."""
        if kind not in self.measured:
            return self.gather(ring_bytes, messages)
        return self._measured(kind, self.width - 1, ring_bytes, messages)

    def _measured(self, kind: Collective, steps: int, ring_bytes: float, messages: float) -> Cost:
        speed = self.measured[kind]
        latency = messages * steps * speed.latency_us * 1e-6
        return Cost(latency + ring_bytes / (speed.gb_per_second * 1e9), self.link)

    def gather(self, ring_bytes: float, messages: float = 1) -> Cost:
        """Return the cost of all-gathers or reduce-scatters.

        A rank sends `ring_bytes` in all `messages` calls together. Each call takes the latency of
        all steps around the ring.
        """
        latency = messages * (self.start_seconds + (self.width - 1) * self.step_seconds)
        return Cost(latency + ring_bytes / self.bandwidth, self.link)

    def exchange(self, sent_bytes: float, messages: float = 1) -> Cost:
        """Return the cost of exchanges, in which each rank sends `sent_bytes` to all others.

        A call takes the latency of one message, since all messages of a rank are sent at once.
        """
        latency = messages * (self.start_seconds + self.step_seconds)
        return Cost(latency + sent_bytes / self.exchange_bandwidth, self.link)

    def all_reduce(self, ring_bytes: float, messages: float = 1) -> Cost:
        """Return the cost of all-reduces; arguments as for `gather`."""
        if "all_reduce" in self.measured:
            return self._measured("all_reduce", 2 * (self.width - 1), ring_bytes, messages)
        ring = 2 * (self.width - 1) * self.step_seconds
        latency = messages * (self.start_seconds + min(ring, self.tree_seconds))
        return Cost(latency + ring_bytes / self.all_reduce_bandwidth, self.link)


class Network:
    """The links of a cluster, by the ranks that they connect."""

    def __init__(self, cluster: ClusterConfig, ranks_per_node: int) -> None:
        # links with the number of ranks in a domain of their level; None = all ranks
        self._levels: list[tuple[LinkConfig, int | None]] = []
        for link in cluster.links:
            size = None if link.ranks is None else min(link.ranks, ranks_per_node)
            if size is None or size > 1:
                self._levels.append((link, size))
        # ranks that are so far apart have the same borders of domains around them
        self.period = math.lcm(*(size for _, size in self._levels if size))
        self._start_seconds = cluster.device.calibration.collective_us * 1e-6

    def span(self, width: int, stride: int, first: int = 0) -> Span:
        """Return the speed of a group of `width` ranks: every `stride`-th rank from `first` on."""
        crossed: list[tuple[LinkConfig, float]] = []  # links with the bandwidth of the ring
        tree_seconds, lower_domains, members = 0.0, width, 1
        exchange_seconds = 0.0  # per byte that a rank sends in an exchange
        summed_seconds = 0.0  # per byte around the ring of an all-reduce
        for link, domain_size in self._levels:
            domains = _domains(width, stride, first, domain_size)
            if domains < lower_domains:  # some ranks of the group meet at this level
                connected = lower_domains / domains
                shared = 1 + link.contention * math.log2(connected)
                bandwidth = link.gb_per_second * 1e9 * link.efficiency / shared
                # the links of the group's ranks in one domain of the level below add up
                crossed.append((link, bandwidth * members))
                crossing = (width - members) / (width - 1)  # share of a rank's bytes
                exchange_seconds = max(exchange_seconds, crossing / bandwidth)
                # a rank sends its part of what the ranks of its domain below have added up
                summed = (1 - 1 / connected) / (1 - 1 / width) / members
                summed_seconds = max(summed_seconds, summed / bandwidth)
                inside = domain_size is not None
                depth = connected - 1 if inside else math.ceil(math.log2(connected))
                tree_seconds += 2 * depth * link.latency_us * 1e-6
            lower_domains = domains
            members = _fewest_members(width, stride, first, domain_size)
        if not crossed:
            nearest = self._levels[0][0].name
            return Span(width, math.inf, math.inf, math.inf, 0.0, 0.0, 0.0, nearest)
        slowest, bandwidth = min(crossed, key=lambda pair: pair[1])
        return Span(
            width,
            bandwidth,
            all_reduce_bandwidth=1 / summed_seconds,
            exchange_bandwidth=1 / exchange_seconds,
            step_seconds=max(link.latency_us for link, _ in crossed) * 1e-6,
            tree_seconds=tree_seconds,
            start_seconds=self._start_seconds,
            link=slowest.name,
            measured=slowest.collectives if len(crossed) == 1 else {},
        )

    def slowest(self, width: int, stride: int, firsts: Iterable[int]) -> Span:
        """Return the slowest speed of groups that work at the same time, given by first ranks."""
        distinct = {first % self.period for first in firsts}
        spans = [self.span(width, stride, first) for first in distinct]
        slowest = min(spans, key=lambda span: span.bandwidth)
        return replace(
            slowest,
            all_reduce_bandwidth=min(span.all_reduce_bandwidth for span in spans),
            exchange_bandwidth=min(span.exchange_bandwidth for span in spans),
            step_seconds=max(span.step_seconds for span in spans),
            tree_seconds=max(span.tree_seconds for span in spans),
            measured=slowest.measured if all(span.measured for span in spans) else {},
        )

    def send(self, distance: int, senders: int, sent_bytes: float) -> Cost:
        """Return the cost of sends over a `distance` from each of the first ranks of the machine.

        The ranks send at the same time, and all wait for the slowest.
        """
        links = {self._between(rank, rank + distance) for rank in range(min(senders, self.period))}
        return max(
            Cost(link.latency_us * 1e-6 + sent_bytes / bandwidth, link.name)
            for link, _ in map(self._levels.__getitem__, links)
            for bandwidth in [link.gb_per_second * 1e9 * link.efficiency]
        )

    def _between(self, rank: int, other: int) -> int:
        """Return the number of the level whose links connect two ranks."""
        return next(
            number
            for number, (_, size) in enumerate(self._levels)
            if size is None or rank // size == other // size
        )


def _domains(width: int, stride: int, first: int, size: int | None) -> int:
    """Return in how many domains of a level a group lies."""
    if size is None:
        return 1
    if stride >= size:
        return width
    return (first + (width - 1) * stride) // size - first // size + 1


def _fewest_members(width: int, stride: int, first: int, size: int | None) -> int:
    """Return how many ranks of a group lie in a domain of a level at least."""
    if size is None:
        return width
    if stride >= size:
        return 1
    start = first % size
    counts = Counter((start + place * stride) // size for place in range(width))
    return min(counts.values())


class GridGroups:
    """The speed of the groups of ranks that communicate in a tensor x data x pipeline grid."""

    def __init__(self, network: Network, grid: Grid) -> None:
        self._network, self._grid = network, grid
        self._spans: dict[tuple[int, int], Span] = {}
        replicas = range(self._distinct(grid.data * grid.pipeline))
        self.tensor = network.slowest(grid.tensor, 1, (grid.tensor * each for each in replicas))

    def data(self, width: int, stride: int) -> Span:
        """Return the speed of groups of `width` data ranks, every `stride`-th data rank."""
        key = (width, stride)
        if key not in self._spans:
            apart = stride * self._grid.tensor
            self._spans[key] = self._network.slowest(width, apart, self._firsts(width, stride))
        return self._spans[key]

    def _firsts(self, width: int, stride: int) -> Iterator[int]:
        """Yield first ranks of groups of data ranks, as many as lie at distinct places of nodes."""
        tensor, data = self._grid.tensor, self._grid.data
        for stage in range(self._distinct(self._grid.pipeline)):
            for block in range(self._distinct(-(-data // (width * stride)))):
                start = (stage * data + block * width * stride) * tensor
                yield from range(start, start + self._distinct(stride * tensor))

    def _distinct(self, count: int) -> int:
        """Return how many of `count` groups at equal distances may differ in their borders."""
        return min(count, self._network.period)

    def level(self, width: int, stride: int) -> Level:
        """Return the farthest level of links that a group of data ranks crosses."""
        extent = width * stride * self._grid.tensor
        if extent > self._grid.ranks_per_node and width > 1:
            return "network"
        return "node" if extent > self._grid.ranks_per_package else "package"

    def send(self, sent_bytes: float, stages: int = 1) -> Cost:
        """Return the cost of sending `sent_bytes` from all ranks to the stage `stages` further on.

        The stages wait for each other, so that the slowest pair of ranks counts.
        """
        of_stage = self._grid.tensor * self._grid.data
        senders = of_stage * max(1, self._grid.pipeline - stages)
        return self._network.send(of_stage * stages, senders, sent_bytes)
