"""Compare saves that overwrite the file of a deleted checkpoint with saves that create new files.

    python -m benchmarks.bench_overwrite                       # 116 MB of states, 10 seconds
    python -m benchmarks.bench_overwrite --folder /dev/shm     # the same in memory
    python -m benchmarks.bench_overwrite --quick               # a smoke test

One rank saves its states with `checkpoint=blocking`, and one checkpoint is kept. A save ends when
it is committed and the checkpoint before it is deleted. Both ways take turns of 5 saves, of which
the first two are not counted, because they find no old file. The table has medians over all counted
saves, with the smallest and the largest.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from rich.table import Table

from benchmarks.checkpoint.checkpoint_states import KnownStates
from benchmarks.testbed import machine
from frontier_llm.checkpoint import spare_files
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import bench_parser, parse_bench, positive, run_command

CONTENDERS = {"old files overwritten": spare_files.LOCAL, "new files": ()}
"""File systems on which files are overwritten, by contender."""
SAVES, UNCOUNTED = 5, 2
"""Saves of a turn, and how many of them are not counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = bench_parser(
        __doc__, rounds=6, folder_for="folder of all checkpoints", quick="2 MB, one round"
    )
    parser.add_argument(
        "--megabytes", type=positive, default=116.0, help="size of the states (default 116)"
    )
    options = parse_bench(parser, arguments, {"megabytes": 2.0, "rounds": 1})
    states = KnownStates(0, 1, int(options.megabytes * 1e6))
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="bench_overwrite_", dir=options.folder) as name:
        for number in range(options.rounds):
            for contender in list(CONTENDERS)[:: -1 if number % 2 else 1]:
                found[contender] += _turn(Path(name) / f"{contender} {number}", contender, states)
    table = Table("contender", "seconds per save", title=machine.about()["processor"])
    for contender, seconds in found.items():
        median, low, high = statistics.median(seconds), min(seconds), max(seconds)
        table.add_row(contender, f"{median:.3f} ({low:.3f} to {high:.3f})")
    wide_console().print(table)
    if options.json:
        facts = {**machine.about(), "bytes": states.size, "seconds": found}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _turn(folder: Path, contender: str, states: KnownStates) -> list[float]:
    """Return the seconds of the counted saves of one turn."""
    store = dist.HashStore()
    manager = CheckpointManager(folder, 0, 1, store, "blocking", 1, timedelta(seconds=60))
    seconds = []
    with mock.patch.object(spare_files, "LOCAL", CONTENDERS[contender]):
        manager.prepare(states.shards)
        for step in range(1, SAVES + 1):
            start = time.perf_counter()
            manager.begin(step, states.shards, {})
            seconds.append(time.perf_counter() - start)
        manager.close()
    spare_files.remove_spare(folder)
    return seconds[UNCOUNTED:]


if __name__ == "__main__":
    sys.exit(run_command(main))
