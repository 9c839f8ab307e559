"""A turn of a contender that trains: what is asked of its ranks, what they measure, and of it all.

Used by bench_sharding.py and bench_library.py. In a turn the ranks are forked, warm up, time some
steps and end, so that their memory is free for the next contender.
"""

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.testbed.sent_counter import tcp_sent_bytes
from benchmarks.testbed.shape import Shape
from frontier_lab.calibration.foreign_load import busy_seconds, idle_share

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""The optimizer of all contenders of bench_sharding.py, as arguments of torch's AdamW."""
CLIP_NORM = 1.0
SEED = 1
QUIET_SECONDS = 0.05
"""If no byte is sent for this long, all messages are considered to have arrived."""
HEADER_BYTES = 14 + 20 + 32
"""Of a packet: those of Ethernet, IPv4 and TCP with a timestamp."""
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss in bytes."""
MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels of a micro-batch, each [samples, sequence] int64."""
Precision = Literal["fp32", "bf16"]


class Peer:
    """One rank of a contender."""

    parameters: int
    """Number of parameters of the complete model."""

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step (forward, backward, clipping, AdamW); return this rank's or the mean loss.

        Collective over all ranks.
        """
        raise NotImplementedError

    def counted_bytes(self) -> float | None:
        """Return the bytes sent since the last call; None if they are not counted."""
        return None

    def settle(self) -> None:
        """Wait for all messages under way, if a step leaves any. Collective over all ranks."""


@dataclass(frozen=True)
class Turn:
    """One turn of a contender: its ranks from their fork to their end."""

    contender: str
    ranks: int
    precision: Precision
    shape: Shape
    samples: int
    """Samples per micro-batch."""
    micro_batches: int
    """Micro-batches per rank and step."""
    warmup: int
    """Steps before the timed ones."""
    steps: int
    """Timed steps."""
    threads: int
    """CPU threads per rank."""
    ranks_per_node: int = 1
    """Consecutive ranks that share a node."""
    ranks_per_package: int = 1
    """Consecutive ranks that share a package; 1 = there are no packages."""
    namespaces: tuple[str, ...] = ()
    """Network namespace of each rank; empty = loopback."""

    @property
    def ranks_per_interface(self) -> int:
        """Ranks that share a network interface: those of a package, or of a node."""
        return self.ranks_per_package if self.ranks_per_package > 1 else self.ranks_per_node

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks."""
        return self.ranks * self.micro_batches * self.samples * self.shape.sequence

    def batches(self, rank: int, step: int) -> list[MicroBatch]:
        """Return random tokens that depend only on the step, the rank and the micro-batch."""
        first = SEED + (step * self.ranks + rank) * self.micro_batches
        batches = []
        for micro in range(self.micro_batches):
            generator = torch.Generator().manual_seed(first + micro)
            size = (self.samples, self.shape.sequence + 1)
            rows = torch.randint(self.shape.vocabulary, size, generator=generator)
            batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        return batches


@dataclass(frozen=True)
class RankFigures:
    """Measurements of one rank in a turn."""

    seconds: float
    """Mean time of the timed steps, from barrier to barrier: the slowest rank counts."""
    cpu_seconds: float
    """CPU time of this process per timed step, with the threads of gloo."""
    losses: list[float]
    """Losses of all steps, warm-up first."""
    parameters: int
    start_bytes: int
    """Peak resident memory before the model was built, which libraries use."""
    peak_bytes: int
    """Peak resident memory of the turn (ru_maxrss): libraries, model, states and activations."""
    tcp_bytes: float | None
    """Bytes per timed step that this rank wrote to TCP sockets; None if they cannot be counted."""
    sent_bytes: float | None
    """Bytes of one more step that the counter of the network interface shows, without headers and
    what was sent again; None on loopback. With packages, an interface is that of a package."""
    counted_bytes: float | None
    """Bytes per timed step as counted by frontier_llm; None for other libraries."""
    idle_share: float | None
    """Idle share of all cores' time during the timed steps; None if unknown."""


def measure(rank: int, make: Callable[[Turn, int], Peer], turn: Turn) -> RankFigures:
    """Build one rank of a contender, run its steps, and return its measurements."""
    torch.set_num_threads(turn.threads)
    start_bytes = _peak_bytes()
    peer = make(turn, rank)
    batches = [turn.batches(rank, index) for index in range(turn.warmup + turn.steps + 1)]
    losses = [peer.step(step) for step in batches[: turn.warmup]]
    peer.settle()
    peer.counted_bytes()
    dist.barrier()
    sent, busy, cpu, start = (
        tcp_sent_bytes(),
        busy_seconds(),
        time.process_time(),
        time.perf_counter(),
    )
    losses += [peer.step(step) for step in batches[turn.warmup : -1]]
    peer.settle()
    dist.barrier()
    seconds = time.perf_counter() - start
    cpu, after, idle = time.process_time() - cpu, tcp_sent_bytes(), busy_seconds() - busy
    counted = peer.counted_bytes()
    return RankFigures(
        seconds=seconds / turn.steps,
        cpu_seconds=cpu / turn.steps,
        losses=losses,
        parameters=peer.parameters,
        start_bytes=start_bytes,
        peak_bytes=_peak_bytes(),
        tcp_bytes=(after.written - sent.written) / turn.steps if sent and after else None,
        counted_bytes=None if counted is None else counted / turn.steps,
        sent_bytes=_count_sent(peer, turn, batches[-1]) if turn.namespaces else None,
        idle_share=idle_share(idle, seconds),
    )


def _count_sent(peer: Peer, turn: Turn, batches: list[MicroBatch]) -> float:
    """Run one more step while nothing else is sent; return the bytes sent per rank of this node.

    Without headers and without what the kernel sent again. Both depend on the load of the machine:
    a receiver acknowledges in more packets if it is woken up late.
    """
    dist.barrier()
    before, resent = _settled_sent_bytes(), _resent_bytes()
    peer.step(batches)
    dist.barrier()
    sent = (_settled_sent_bytes() - before) / turn.ranks_per_interface
    return sent - (_resent_bytes() - resent)


def _resent_bytes() -> int:
    counted = tcp_sent_bytes()
    return counted.resent if counted else 0


def _settled_sent_bytes() -> int:
    """Wait until no more bytes are sent; return the bytes so far. Collective over all ranks."""
    last = -1
    while last != (last := _sent_bytes(os.environ["GLOO_SOCKET_IFNAME"])):
        time.sleep(QUIET_SECONDS)
    dist.barrier()
    return last


def _sent_bytes(interface: str) -> int:
    """Return the bytes without headers that this namespace has sent over an interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = {name.strip(): found for name, _, found in (line.partition(":") for line in lines)}
    sent, packets = counters[interface].split()[8:10]
    return int(sent) - int(packets) * HEADER_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


@dataclass(frozen=True)
class TurnFigures:
    """What all ranks of a contender have measured in a turn; others than below are means."""

    tokens_per_second: float
    """Speed of all ranks together."""
    seconds: float
    """Time of a step."""
    cpu_seconds: float
    losses: list[list[float]]
    """Losses of all steps by rank. All libraries except frontier_llm start with the same weights,
    so their first losses are equal. frontier_llm draws other weights, so its first loss differs a
    little."""
    parameters: int
    peak_bytes: int
    """Peak memory of the rank that uses most."""
    own_bytes: int
    """Peak memory minus the memory before the model was built, of the rank with the most growth."""
    tcp_bytes: float | None
    sent_bytes: float | None
    counted_bytes: float | None
    idle_share: float | None
    other_cores: float
    """Number of cores that other programs used."""

    @classmethod
    def of(cls, turn: Turn, ranks: Sequence[RankFigures]) -> "TurnFigures":
        """Unite the measurements of the ranks.

        Raises:
            ValueError: a loss is not finite.
        """
        losses = [rank.losses for rank in ranks]
        if not all(math.isfinite(loss) for of_rank in losses for loss in of_rank):
            raise ValueError(f"a loss is not finite: {losses}")

        def mean(name: str) -> float | None:
            found = [getattr(rank, name) for rank in ranks if getattr(rank, name) is not None]
            return fmean(found) if found else None

        seconds = max(rank.seconds for rank in ranks)
        cpu_seconds, idle = fmean(rank.cpu_seconds for rank in ranks), mean("idle_share")
        used = (os.cpu_count() or 1) * (1 - (idle or 0.0))
        return cls(
            tokens_per_second=turn.tokens_per_step / seconds,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            losses=losses,
            parameters=ranks[0].parameters,
            peak_bytes=max(rank.peak_bytes for rank in ranks),
            own_bytes=max(rank.peak_bytes - rank.start_bytes for rank in ranks),
            tcp_bytes=mean("tcp_bytes"),
            sent_bytes=mean("sent_bytes"),
            counted_bytes=mean("counted_bytes"),
            idle_share=idle,
            other_cores=max(0.0, used - len(ranks) * cpu_seconds / seconds),
        )
