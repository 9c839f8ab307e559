"""Measure how the store's work grows with the number of ranks.

One process holds torch's key-value store, as rank 0 does. Another one does what the ranks of a job
do in it, one rank after the other: report before the start, commit a checkpoint, read the roster of
a new generation, and agree on what survived. The program prints the CPU seconds of both processes
and the exponent of their growth. Waiting ranks, the network and the files are not simulated.

    python -m benchmarks.bench_store --ranks 64 1024 3072 9600
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import bench_parser, fixed, print_table, write_json
from frontier_llm.checkpoint.commit_barrier import CommitBarrier
from frontier_llm.launch.coordination import read_all
from frontier_llm.membership.roster_store import Roster, RosterStore

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

RECORD_BYTES = 10_000
"""Size of a rank's record of a checkpoint: the mean of GPT 175B on 1,024 ranks."""
REPORT_BYTES = 1_500
"""Size of a rank's report before the start."""
LONG = timedelta(minutes=5)


@dataclass(frozen=True)
class Row:
    """CPU seconds of one kind of work for one number of ranks."""

    work: str
    ranks: int
    server: float
    """Of the process that holds the store, whose single thread serves all ranks."""
    client: float
    """Of the process that does the work of all ranks."""


def commit(store: "Store", ranks: int) -> None:
    """All ranks report what they have written, and rank 0 commits."""
    barriers = [CommitBarrier(store, "save", rank, ranks, LONG) for rank in range(ranks)]
    record = os.urandom(RECORD_BYTES // 2).hex()
    for barrier in barriers:
        barrier.arrive(record)
    assert len(barriers[0].wait_for_ranks()) == ranks
    barriers[0].seal()
    barriers[0].conclude()
    for barrier in barriers[1:]:
        barrier.wait_for_outcome()
    barriers[0].delete_keys()


def reports(store: "Store", ranks: int) -> None:
    """All ranks report themselves, rank 0 reads the reports, and all read its answer."""
    report = os.urandom(REPORT_BYTES // 2).hex()
    for rank in range(ranks):
        store.set(f"report/{rank}", report)
        store.add("reports", 1)
    assert len(read_all(store, [f"report/{rank}" for rank in range(ranks)])) == ranks
    store.set("answer", "passed")
    for _ in range(ranks):
        store.wait(["answer"], LONG)
        store.get("answer")


def roster(store: "Store", ranks: int) -> None:
    """All members read a roster in which ten ranks have new members."""
    members = list(range(ranks))
    for number in range(10):
        members[number * ranks // 10] = ranks + number
    rosters = RosterStore(store)
    rosters.publish(Roster(1, tuple(members), 3.0))
    for rank, member in enumerate(members):
        found = rosters.wait_for(1).members
        assert found is not None
        assert found[rank] == member
        rosters.report_arrival(1, rank)


WORKS: dict[str, Callable[["Store", int], None]] = {
    "commit": commit,
    "reports": reports,
    "roster": roster,
}


def _serve(port: Connection) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()  # until the other process is done


@contextmanager
def _server() -> Iterator[tuple["Store", int]]:
    """Start a process with a store; yield a connection to it and the id of the process."""
    from torch.distributed import TCPStore

    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,))
    process.start()
    try:
        yield (
            TCPStore("127.0.0.1", here.recv(), is_master=False, wait_for_workers=False),
            process.pid or 0,
        )
    finally:
        here.send("done")
        process.join()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(work: str, ranks: int) -> Row:
    """Do one kind of work in a new store."""
    with _server() as (store, pid):
        server, client = _cpu_seconds(pid), time.process_time()
        WORKS[work](store, ranks)
        return Row(work, ranks, _cpu_seconds(pid) - server, time.process_time() - client)


def growth(small: Row | None, large: Row) -> str:
    """Return p of server seconds ~ ranks^p between two rows; - if they are too short to tell."""
    if small is None or large.server < 0.1:
        return "-"
    power = math.log(large.server / max(small.server, 0.01)) / math.log(large.ranks / small.ranks)
    return fixed(power)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[64, 1024, 3072, 9600], metavar="N",
        help="numbers of ranks (default: 64 1024 3072 9600)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    rows = {work: [measure(work, ranks) for ranks in sorted(options.ranks)] for work in WORKS}
    headings = ["work", "ranks", "store CPU s", "ranks' CPU s, all together", "exponent"]
    cells = [
        (row.work, str(row.ranks), fixed(row.server), fixed(row.client), growth(before, row))
        for of_work in rows.values()
        for before, row in zip([None, *of_work], of_work, strict=False)
    ]
    print_table("The store's work", headings, cells)
    write_json(options, {"rows": [asdict(row) for of_work in rows.values() for row in of_work]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
