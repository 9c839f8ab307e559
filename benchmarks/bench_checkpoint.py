"""Compare savers: frontier_llm (ours), torch.save, and torch.distributed.checkpoint (DCP).

    python -m benchmarks.bench_checkpoint                  # 400 MB per rank, 2 ranks
    python -m benchmarks.bench_checkpoint --quick          # a smoke test of half a minute
    python -m benchmarks.bench_checkpoint --megabytes 2000 --folder /mnt/bb/$USER --json FILE

The states of a rank are its weights and optimizer moments. Savers take turns: A B C, C B A, ... and
a round is one turn of each. A saver's turn runs in forked CPU ranks over gloo. A step consists of
matrix products and an update that changes every element of the states. A turn has three phases:
  1. long steps, alternating without and with a save, in which every saver should finish;
  2. short steps, whose products take about as long as a save of ours-blocking;
  3. restores, whose results are compared with the saved states.
Each saver keeps one checkpoint and deletes the previous one.

The table has one row per saver. Values are medians over saves and rounds, where the slowest rank of
a save counts:
    blocked       time for which the save blocked training, at its start and before the update
    durable       time until the checkpoint was synced and complete on every rank; -: unknown
    compute       number of products computed during that time, divided by the number computed in
      meanwhile   the same time without a save
    long step     time of a step with a save, divided by the time of a step without a save
    short steps   time of steps with a save in each, until the last save is complete, divided by
                  the time of the same number of steps without saves
    restore       time until every rank has its states again, from an empty page cache; our savers
                  verify digests
    of disk's     restored bytes per second, divided by the rate at which all ranks read blocks of
      rate        16 MiB at once, with or without the page cache, whichever is faster
bare-writes is not a saver: a thread writes the same number of bytes from one buffer and does
nothing else. Its effect on the computation is a lower bound for every saver that writes as fast.
MB are millions of bytes.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

import torch.distributed as dist

from benchmarks.checkpoint.saver_turn import Rank, Save, SaverFigures, SaverTurn
from benchmarks.checkpoint.savers import SAVERS, Place
from benchmarks.harness import (
    MEGA,
    Contender,
    add_numbers,
    bench_parser,
    compare,
    fixed,
    parse_bench,
    print_table,
    progress,
    take_turns,
    work_folder,
    write_json,
)
from benchmarks.testbed import disk
from benchmarks.testbed.disk import DiskFigures
from benchmarks.testbed.forked import on_ranks
from frontier_lab.option_values import positive
from frontier_llm.cli.options import run_command

QUICK = {"megabytes": 20.0, "rounds": 1, "saves": 1, "long_seconds": 0.4, "short_seconds": 0.1,
         "short_steps": 2, "restores": 1}  # fmt: skip
"""Options of --quick."""
PROBE = "ours-blocking"
"""Saver whose time until a checkpoint is durable sets the length of a short step."""
NUMBERS = (
    ("ranks", 1, 2, "number of ranks"),
    ("saves", 1, 3, "long steps with a save per turn"),
    ("short-steps", 1, 8, "short steps per turn"),
    ("restores", 0, 3, "restores per turn"),
)
COLUMNS = ("saver", "blocked\nms", "durable\ns", "compute\nmeanwhile", "long\nstep", "short\nsteps",
           "restore\ns", "of disk's\nrate", "on disk\nMB")  # fmt: skip


Savers = list[Contender[list[SaverFigures]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse(arguments)
    with work_folder("bench_checkpoint", options.folder) as folder:
        seconds, rates, savers = measure(options, folder)
    rows = [
        {"saver": one.name, **(summary(one.rounds) if one.rounds else {}), "error": one.error}
        for one in savers
    ]
    title = (
        f"{options.ranks} ranks with {options.megabytes:g} MB of states each; long steps of "
        f"{options.long_seconds:g} s, short steps of {seconds:.2f} s"
    )
    caption = (
        f"the disk alone: writes {rates['write'] / 1e9:.2f} GB/s, reads "
        f"{rates['read'] / 1e9:.2f} GB/s"
    )
    print_table(title, COLUMNS, [cells(row, rates["read"]) for row in rows], caption=caption)
    for row in rows:
        if row["error"]:
            print(f"{row['saver']}: {row['error']}", file=sys.stderr)
    facts = {"short_seconds": seconds, "disk_bytes_per_second": rates, "savers": rows}
    write_json(options, facts)
    return 1 if any(row["error"] for row in rows) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(
        __doc__, rounds=3, folder_for="in which to save", quick="20 MB, one round"
    )
    add = parser.add_argument
    add("--megabytes", type=positive, default=400.0, help="states per rank (default 400)")
    add("--savers", nargs="+", default=list(SAVERS), choices=list(SAVERS),
        help="savers to compare (default all)")  # fmt: skip
    add("--long-seconds", type=positive, default=2.5,
        help="seconds of products in a long step (default 2.5)")  # fmt: skip
    add("--short-seconds", type=positive,
        help=f"seconds of products in a short step (default: a save of {PROBE})")  # fmt: skip
    add_numbers(parser, NUMBERS)
    return parse_bench(parser, arguments, QUICK)


def measure(options: argparse.Namespace, folder: Path) -> tuple[float, dict[str, float], Savers]:
    """Run all turns; return the seconds of a short step, the rates of the disk, and the savers."""
    size, ranks = round(options.megabytes * MEGA), options.ranks

    def turn(saver: str, short_seconds: float) -> list[SaverFigures]:
        settings = SaverTurn(saver, size, options.saves, options.long_seconds, short_seconds,
                             options.short_steps, options.restores)  # fmt: skip
        with work_folder("turn", folder) as files:
            return on_ranks(take_turn, ranks, settings, files)

    seconds = options.short_seconds
    if seconds is None:
        seconds = summary([turn(PROBE, 0.0)])["durable_seconds"]
    disks = compare({"disk": lambda: on_ranks(disk.measure, ranks, folder, size)}, options.rounds)
    savers = [Contender(name, partial(turn, name, seconds)) for name in options.savers]
    with progress("", options.rounds * len(savers)) as advance:
        take_turns(savers, options.rounds, advance)
    return seconds, disk_rates(disks["disk"].rounds), savers


def take_turn(rank: int, settings: SaverTurn, folder: Path) -> SaverFigures:
    """Take a saver's turn on one rank."""
    ranks = dist.get_world_size()
    return Rank(settings, Place(rank, ranks, _store(rank, ranks), folder)).run()


def _store(rank: int, ranks: int) -> dist.Store:
    """Return the key-value store of all ranks, of which rank 0 is the server."""
    host, server = "127.0.0.1", None
    if rank == 0:
        server = dist.TCPStore(host, 0, ranks, True, wait_for_workers=False)
    port = [server.port if server else 0]
    dist.broadcast_object_list(port)
    return server or dist.TCPStore(host, port[0], ranks, False)


def disk_rates(rounds: Sequence[Sequence[DiskFigures]]) -> dict[str, float]:
    """Return the median rates of the disk alone in bytes per second of all ranks together.

    The slowest rank counts. `read` is with or without the page cache, whichever is faster.
    """

    def rate(name: str) -> float:
        return median(
            sum(rank.size for rank in ranks) / max(getattr(rank, name) for rank in ranks)
            for ranks in rounds
        )

    direct, cached = rate("read_seconds"), rate("cached_read_seconds")
    return {"write": rate("write_seconds"), "direct_read": direct, "cached_read": cached,
            "read": max(direct, cached)}  # fmt: skip


def summary(rounds: Sequence[Sequence[SaverFigures]]) -> dict[str, Any]:
    """Return the figures of a saver from those of each rank, by round.

    Medians over all saves or restores, of which the slowest rank counts. None: unknown, or the
    saver cannot restore.
    """
    saves: list[tuple[Save, ...]] = [
        save for ranks in rounds for save in zip(*(rank.saves for rank in ranks), strict=True)
    ]
    durable = [[rank.durable_seconds for rank in save] for save in saves]
    known = [max(s for s in save if s is not None) for save in durable if None not in save]
    shares = [rank.compute_share for save in saves for rank in save]
    known_shares = [share for share in shares if share is not None]
    rates = [
        sum(rank.states_bytes for rank in ranks) / max(seconds)
        for ranks in rounds
        for seconds in zip(*(rank.restore_seconds for rank in ranks), strict=True)
    ]
    return {
        "blocked_seconds": median(
            max(rank.begin_seconds + rank.fence_seconds for rank in save) for save in saves
        ),
        "durable_seconds": median(known) if known else None,
        "compute_share": median(known_shares) if known_shares else None,
        "step_ratio": median(
            max(rank.step_seconds for rank in save) / max(rank.plain_step_seconds for rank in save)
            for save in saves
        ),
        "short_ratio": median(
            max(rank.short_seconds for rank in ranks)
            / max(rank.plain_short_seconds for rank in ranks)
            for ranks in rounds
        ),
        "restore_rate": median(rates) if rates else None,
        "states_bytes": sum(rank.states_bytes for rank in rounds[0]),
        "disk_bytes": rounds[0][0].disk_bytes,
        "rounds": [[asdict(rank) for rank in ranks] for ranks in rounds],
    }


def cells(row: dict[str, Any], disk_rate: float) -> list[str]:
    """Return the row of a saver."""
    if "rounds" not in row:
        return [row["saver"], "failed"]
    rate = row["restore_rate"]
    return [
        row["saver"],
        fixed(row["blocked_seconds"], 1, 1000),
        fixed(row["durable_seconds"]),
        fixed(row["compute_share"]),
        fixed(row["step_ratio"], 3),
        fixed(row["short_ratio"]),
        "-" if rate is None else fixed(row["states_bytes"] / rate),
        "-" if rate is None else f"{rate / disk_rate:.0%}",
        fixed(row["disk_bytes"], 0, 1 / MEGA),
    ]


if __name__ == "__main__":
    sys.exit(run_command(main))
