"""Compare savers: frontier_llm (ours), torch.save, and torch.distributed.checkpoint (DCP).

    python -m benchmarks.bench_checkpoint                  # 400 MB per rank, 2 ranks
    python -m benchmarks.bench_checkpoint --quick          # a smoke test of half a minute
    python -m benchmarks.bench_checkpoint --megabytes 2000 --folder /mnt/bb/$USER --json FILE

The states of a rank are its weights and optimizer moments. Savers take turns: A B C, A B C, ... and
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
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

import torch.distributed as dist
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.checkpoint.checkpoint_results import MEGA, DiskOutcome, Outcome, make_table
from benchmarks.checkpoint.checkpoint_savers import SAVERS, TIMEOUT, Place
from benchmarks.checkpoint.checkpoint_turn import Rank, SaverFigures, SaverTurn, saver_figures_from
from benchmarks.testbed import disk, machine
from benchmarks.testbed.disk import DiskFigures
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, positive, run_command
from frontier_llm.errors import TrainingError
from frontier_llm.launch.launcher import LaunchOptions, launch
from frontier_llm.launch.rendezvous import init_process_group
from frontier_llm.launch.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

QUICK = {"megabytes": 20.0, "rounds": 1, "saves": 1, "long_seconds": 0.4, "short_seconds": 0.1,
         "short_steps": 2, "restores": 1}  # fmt: skip
"""Options of --quick."""
TABLE_WIDTH = 100
"""Smallest width of the table in characters."""
PROBE = "ours-blocking"
"""Saver whose time until a checkpoint is durable sets the length of a short step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=options.folder) as name:
        return Bench(options, Path(name)).run()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(
        __doc__, rounds=3, folder_for="in which to save", quick="20 MB, one round"
    )
    add = parser.add_argument
    add("--megabytes", type=positive, default=400.0, help="states per rank (default 400)")
    add("--ranks", type=at_least(1), default=2, help="number of ranks (default 2)")
    add("--savers", nargs="+", default=list(SAVERS), choices=list(SAVERS),
        help="savers to compare (default all)")  # fmt: skip
    add("--saves", type=at_least(1), default=3, help="long steps with a save per turn (default 3)")
    add(
        "--long-seconds",
        type=positive,
        default=2.5,
        help="seconds of products in a long step (default 2.5)",
    )
    add("--short-seconds", type=positive,
        help=f"seconds of products in a short step (default: a save of {PROBE})")  # fmt: skip
    add("--short-steps", type=at_least(1), default=8, help="short steps per turn (default 8)")
    add("--restores", type=at_least(0), default=3, help="restores per turn (default 3)")
    return parse_bench(parser, arguments, QUICK)


class Bench:
    """One run of the benchmark."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._disk = DiskOutcome()
        self._outcomes = [Outcome(name, SAVERS[name][0]) for name in options.savers]
        self._short_seconds = 0.0

    def run(self) -> int:
        """Run all turns, print and write the results, and return the exit code."""
        options = self._options
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        # No refresh thread, because this process forks.
        with Progress(*columns, auto_refresh=False, transient=True) as progress:
            bar = progress.add_task("", total=options.rounds * (len(self._outcomes) + 1) + 1)

            def show(name: str, work: Callable[[], None]) -> None:
                progress.update(bar, description=name, refresh=True)
                work()
                progress.update(bar, advance=1, refresh=True)

            show(PROBE, self._set_short_seconds)
            for _ in range(options.rounds):
                show("disk", self._measure_disk)
                for outcome in self._outcomes:
                    show(outcome.saver, partial(self._add_turn, outcome))
        self._report()
        return 1 if any(outcome.error for outcome in self._outcomes) else 0

    def _set_short_seconds(self) -> None:
        """Set the length of a short step to the option, or to the measured time of a save."""
        if self._options.short_seconds is not None:
            self._short_seconds = self._options.short_seconds
            return
        outcome = Outcome(PROBE, "", [self._turn(PROBE)])
        self._short_seconds = outcome.durable_seconds or 0.0

    def _add_turn(self, outcome: Outcome) -> None:
        """Add a turn of a saver to its results, unless the saver has failed before."""
        if outcome.error is None:
            try:
                outcome.rounds.append(self._turn(outcome.saver))
            except TrainingError as error:
                outcome.error = str(error)

    def _measure_disk(self) -> None:
        """Measure the disk on all ranks at once."""
        size = round(self._options.megabytes * MEGA)

        def work(place: Place) -> DiskFigures:
            return disk.measure(place.folder, place.rank, size)

        self._disk.rounds.append([DiskFigures(**rank) for rank in self._fork(work)])

    def _turn(self, saver: str) -> list[SaverFigures]:
        """Run one turn of a saver; return the measurements of each rank."""
        options = self._options

        def work(place: Place) -> SaverFigures:
            turn = SaverTurn(
                saver=saver,
                size=round(options.megabytes * MEGA),
                saves=options.saves,
                long_seconds=options.long_seconds,
                short_seconds=self._short_seconds,
                short_steps=options.short_steps,
                restores=options.restores,
            )
            return Rank(turn, place).run()

        return [saver_figures_from(rank) for rank in self._fork(work)]

    def _fork(self, work: Callable[[Place], Any]) -> list[dict[str, Any]]:
        """Run a function on forked ranks with an empty folder; return its result on each rank.

        Raises:
            TrainingError: a rank failed; its traceback has been printed.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            results, folder = Path(name, "results"), Path(name, "files")
            results.mkdir()
            folder.mkdir()

            def target(world: World, store: "Store") -> None:
                init_process_group(world, store, "gloo", TIMEOUT)
                figures = work(Place(world.rank, world.size, store, folder))
                (results / f"{world.rank}.json").write_text(json.dumps(asdict(figures)))
                dist.barrier()  # no rank closes its sockets while another reads from them

            ranks = self._options.ranks
            launch_options = LaunchOptions(ranks=ranks, failure_dir=Path(name, "failures"))
            if exit_code := launch(target, launch_options).exit_code:
                raise TrainingError(f"the ranks ended with exit code {exit_code}")
            return [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]

    def _report(self) -> None:
        """Print the table and write the JSON."""
        options = self._options
        title = (
            f"{options.ranks} ranks with {options.megabytes:g} MB of states each; long steps of "
            f"{options.long_seconds:g} s, short steps of {self._short_seconds:.2f} s"
        )
        console = wide_console()
        console.width = max(console.width, TABLE_WIDTH)  # for output that is not a terminal
        console.print(make_table(title, self._outcomes, self._disk))
        if options.json:
            facts = {
                **machine.about(),
                "options": {key: str(value) for key, value in vars(options).items()},
                "short_seconds": self._short_seconds,
                "disk": self._disk.to_dict(),
                "savers": [outcome.to_dict() for outcome in self._outcomes],
            }
            options.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    sys.exit(run_command(main))
