"""How much of a transfer this machine can hide behind computation, whoever asks for it.

    python tools/bench_overlap.py                             # two ranks on loopback
    sudo .venv/bin/python tools/bench_overlap.py --links loopback 1gbit 200mbit

Two ranks, one thread each, exchange messages over gloo, both ways; then they multiply matrices for
as long; then both: a message is begun, a share of the products is computed, the message is waited
for, and so on. Rounds take turns, medians count, of both ranks the slower.

The table, a row a link:
    transfer   seconds of the messages alone, and MB/s each way
    compute    seconds of the products alone
    together   seconds of both
    hidden     of the shorter of the two, what is not seen in both together
Where there are no more cores than ranks, gloo's threads and the kernel's network take the cores
from the computation. What is not hidden here no schedule can hide.
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
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from tools.bench import machine
from tools.bench.forked import on_ranks
from tools.bench.namespaces import namespaces
from tools.console import wide_console
from tools.options import at_least, bench_parser, ending, positive
from tools.plain_table import plain_table

RANKS = 2
MATRIX = 512
"""Rows of the matrices: a product takes some milliseconds."""


@dataclass(frozen=True)
class Figures:
    """Of one link, seconds."""

    link: str
    megabytes: float
    """Of all messages, each way."""
    transfer: float
    compute: float
    together: float

    @property
    def hidden(self) -> float:
        """Share of the shorter of the two."""
        saved = self.transfer + self.compute - self.together
        return saved / min(self.transfer, self.compute)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON; return the exit code."""
    options = _parse(arguments)
    found = [measure(link, options) for link in options.links]
    title = f"{RANKS} ranks on {os.cpu_count()} cores, seconds"
    table = plain_table(title, ["link", "transfer", "MB/s", "compute", "together", "hidden"])
    for one in found:
        seconds = [f"{value:.2f}" for value in (one.transfer, one.compute, one.together)]
        speed = f"{one.megabytes / one.transfer:.0f}"
        table.add_row(one.link, seconds[0], speed, *seconds[1:], f"{one.hidden:.0%}")
    wide_console().print(table)
    if options.json:
        facts = {
            **machine.about(),
            "links": [{**asdict(one), "hidden": one.hidden} for one in found],
        }
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


def measure(link: str, options: argparse.Namespace) -> Figures:
    """Measure one link.

    Raises:
        ConfigError: the link cannot be made here.
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
        help="loopback, the default, or rates such as 1gbit, for which root is needed",
    )  # fmt: skip
    add("--megabytes", type=positive, default=8.0, help="of a message (default 8)")
    add("--messages", type=at_least(1), default=20, help="of a round (default 20)")
    return parser.parse_args(arguments)


def _rank(rank: int, megabytes: float, messages: int, rounds: int) -> tuple[float, float, float]:
    """Return the medians of transfer, compute and together."""
    work = _Work(rank, round(megabytes * 1e6) // 4)
    work.round(messages, products=0)  # connects
    message = work.round(messages, products=0) / messages
    product = work.round(1, products=100, sends=False) / 100
    agreed = torch.tensor(message / product)
    dist.all_reduce(agreed)
    products = max(1, round(float(agreed) / RANKS))
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
    """What a rank does."""

    def __init__(self, rank: int, elements: int) -> None:
        self._peer = 1 - rank
        self._sent, self._received = torch.ones(elements), torch.empty(elements)
        self._matrix, self._product = torch.rand(MATRIX, MATRIX), torch.empty(MATRIX, MATRIX)

    def round(self, messages: int, products: int, *, sends: bool = True) -> float:
        """Exchange messages, with that many products during each; return the seconds."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(messages):
            under_way = self._exchange() if sends else []
            for _ in range(products):
                torch.mm(self._matrix, self._matrix, out=self._product)
            for one in under_way:
                one.wait()
        return time.perf_counter() - start

    def _exchange(self) -> list[dist.Work]:
        works = [dist.irecv(self._received, self._peer), dist.isend(self._sent, self._peer)]
        return [work for work in works if work is not None]


if __name__ == "__main__":
    sys.exit(ending(main))
