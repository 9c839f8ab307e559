"""The table of the three parts of ZeRO++ (arXiv:2306.10209): what each saves in bytes and seconds.

The figures are predicted for the paper's 18B model on 384 V100, at two rates of the network.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from docs.generate.predictions import with_network
from frontier_llm.cli.experiments import composed
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_traffic import StateTraffic
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import estimate

RANKS, RANKS_PER_NODE = 384, 16
NODE_GBITS = (100, 400)
"""Rates of the network per node, Gbit/s: those at which the paper measured."""


@dataclass(frozen=True)
class Parts:
    """A combination of the parts of ZeRO++."""

    name: str
    sharding: str
    """Choice of `sharding=`; `zeropp` gathers parameters inside a node, as hpZ does."""
    collectives: str
    """Choice of `collectives=`."""

    @property
    def overrides(self) -> tuple[str, str]:
        """The words on the command line."""
        return f"sharding={self.sharding}", f"collectives={self.collectives}"


COMBINATIONS = (
    Parts("none (ZeRO-3)", "zero3", "plain"),
    Parts("qwZ", "zero3", "qwz"),
    Parts("hpZ", "zeropp", "plain"),
    Parts("qgZ", "zero3", "qgz"),
    Parts("qwZ and hpZ", "zeropp", "qwz"),
    Parts("hpZ and qgZ", "zeropp", "qgz"),
    Parts("all (ZeRO++)", "zeropp", "zeropp"),
)


def planned() -> Iterator[str]:
    """Yield the table of bytes that leave a node and of seconds of a step."""
    rates = [f"{gbits} Gbit/s" for gbits in NODE_GBITS]
    yield (
        "| parts | overrides | leaves a node, GB | "
        + " | ".join(f"step, {rate} | speed-up" for rate in rates)
        + " |"
    )
    yield "|---|---|---|" + "---|---|" * len(rates)
    base = [_seconds(COMBINATIONS[0], gbits) for gbits in NODE_GBITS]
    for parts in COMBINATIONS:
        cells = [f"`{' '.join(parts.overrides)}`", f"{_leaves_a_node(parts) / 1e9:.1f}"]
        for gbits, plain in zip(NODE_GBITS, base, strict=True):
            seconds = _seconds(parts, gbits)
            cells += [f"{seconds:.2f} s", f"{plain / seconds:.2f}x"]
        yield f"| {parts.name} | " + " | ".join(cells) + " |"


def _seconds(parts: Parts, node_gbits: float) -> float:
    config = with_network(composed("experiment=zeropp_18b", *parts.overrides), node_gbits)
    return estimate(Candidate.of(config, RANKS, RANKS_PER_NODE)).time.seconds


def _leaves_a_node(parts: Parts) -> float:
    """Return the bytes that the ranks of a node send to other nodes in a step."""
    config = composed("experiment=zeropp_18b", *parts.overrides)
    layout = ResolvedLayout.resolve(config, RANKS, RANKS_PER_NODE)
    traffic = StateTraffic(
        layout.grid,
        layout.factors,
        layout.micro_batches,
        params_bytes=layout.compute_bytes,
        formats=layout.formats,
    )
    buffers, gathers = layout.unit_layouts(0), layout.gathers(0)
    units = Counter(
        (buffer.size, buffer.decayed, gathers[name]) for name, buffer in buffers.items()
    )
    sent = (
        count * flow.network
        for rank in range(RANKS_PER_NODE)
        for (size, decayed, times), count in units.items()
        for flow in traffic.unit(rank, size, times, decayed).values()
    )
    return sum(sent)
