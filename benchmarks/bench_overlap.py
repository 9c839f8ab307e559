"""Measure how much communication this machine can overlap with computation.

    python -m benchmarks.bench_overlap                             # two ranks on loopback
    sudo .venv/bin/python -m benchmarks.bench_overlap --links loopback 1gbit 200mbit
    python -m benchmarks.bench_overlap --json benchmarks/results/overlap_<cpu>_<date>.json

Two ranks with one thread each exchange messages over gloo in both directions. Then they multiply
matrices for about the same time. Then they do both at once: they start a message, compute a share
of the matrix products, and wait for the message. The three measurements take turns. Times are
medians over rounds, of the slower rank.

The table has one row per link:
    transfer   seconds of the messages alone
    MB/s       speed of the messages alone, per direction
    compute    seconds of the matrix products alone
    together   seconds of both at once
    hidden     time saved by doing both at once, divided by the shorter of transfer and compute

If there are no more cores than ranks, gloo's threads and the kernel's network code compete with the
computation for the cores. A training program cannot overlap more communication than this benchmark.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from benchmarks.bench_options import bench_parser
from benchmarks.testbed import machine
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.namespaces import namespaces
from frontier_llm.cli.console import plain_table, wide_console
from frontier_llm.cli.options import at_least, positive, run_command

RANKS = 2
MATRIX = 512
"""Rows of the square matrices; a product takes a few milliseconds."""


@dataclass(frozen=True)
class Figures:
    """Measurements of one link; times are in seconds."""

    link: str
    megabytes: float
    """Size of all messages per direction."""
    transfer: float
    compute: float
    together: float

    @property
    def hidden(self) -> float:
        """Time saved by the overlap, as a share of the shorter of transfer and compute."""
        saved = self.transfer + self.compute - self.together
        return saved / min(self.transfer, self.compute)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each link, print a table, write JSON; return the exit code."""
    options = _parse(arguments)
    found = [measure(link, options) for link in options.links]
    title = f"{RANKS} ranks on {os.cpu_count()} cores, seconds"
    table = plain_table(title, ["link", "transfer", "MB/s", "compute", "together", "hidden"])
    for figures in found:
        times = (figures.transfer, figures.compute, figures.together)
        transfer, compute, together = (f"{seconds:.2f}" for seconds in times)
        speed = f"{figures.megabytes / figures.transfer:.0f}"
        hidden = f"{figures.hidden:.0%}"
        table.add_row(figures.link, transfer, speed, compute, together, hidden)
    wide_console().print(table)
    if options.json:
        facts = {
            **machine.about(),
            "links": [{**asdict(figures), "hidden": figures.hidden} for figures in found],
        }
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


def measure(link: str, options: argparse.Namespace) -> Figures:
    """Measure one link.

    Raises:
        ConfigError: this machine cannot simulate a link of this rate.
        LaunchError: a rank failed.
    """
    with nullcontext(()) if link == "loopback" else namespaces(RANKS, link) as names:
        sizes = (options.megabytes, options.messages, options.rounds)
        seconds = on_ranks(_rank, RANKS, *sizes, namespaces=names)
    slower = (max(values) for values in zip(*seconds, strict=True))
    return Figures(link, options.megabytes * options.messages, *slower)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--links", nargs="+", default=["loopback"], metavar="RATE",
        help="loopback (default), or rates such as 1gbit, which need root",
    )  # fmt: skip
    add("--megabytes", type=positive, default=8.0, help="size of a message (default 8)")
    add("--messages", type=at_least(1), default=20, help="messages per round (default 20)")
    return parser.parse_args(arguments)


def _rank(rank: int, megabytes: float, messages: int, rounds: int) -> tuple[float, float, float]:
    """Run as one rank; return the medians of transfer, compute and together in seconds."""
    work = _Work(rank, round(megabytes * 1e6) // 4)
    work.round(messages, products=0)  # makes the connections
    message_seconds = work.round(messages, products=0) / messages
    product_seconds = work.round(1, products=100, sends=False) / 100
    products_per_message = torch.tensor(message_seconds / product_seconds)
    dist.all_reduce(products_per_message)  # both ranks must compute the same number
    products = max(1, round(float(products_per_message) / RANKS))
    found = [
        (
            work.round(messages, products=0),
            work.round(messages, products=products, sends=False),
            work.round(messages, products=products),
        )
        for _ in range(rounds)
    ]
    transfer, compute, together = map(statistics.median, zip(*found, strict=True))
    return transfer, compute, together


class _Work:
    """The messages and matrix products of one rank."""

    def __init__(self, rank: int, elements: int) -> None:
        self._peer = 1 - rank
        self._sent, self._received = torch.ones(elements), torch.empty(elements)
        self._matrix, self._product = torch.rand(MATRIX, MATRIX), torch.empty(MATRIX, MATRIX)

    def round(self, messages: int, products: int, *, sends: bool = True) -> float:
        """Exchange messages and compute products during each; return the seconds.

        Args:
            messages: number of messages.
            products: number of matrix products per message.
            sends: False computes the products without the messages.
        """
        dist.barrier()
        start = time.perf_counter()
        for _ in range(messages):
            works = self._exchange() if sends else []
            for _ in range(products):
                torch.mm(self._matrix, self._matrix, out=self._product)
            for work in works:
                work.wait()
        return time.perf_counter() - start

    def _exchange(self) -> list[dist.Work]:
        """Start to send a message to the other rank and to receive one from it."""
        works = [dist.irecv(self._received, self._peer), dist.isend(self._sent, self._peer)]
        return [work for work in works if work is not None]


if __name__ == "__main__":
    sys.exit(run_command(main))
