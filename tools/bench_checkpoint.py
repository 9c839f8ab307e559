"""Compare ways to save: ours, torch.save, and torch.distributed.checkpoint (DCP).

    python tools/bench_checkpoint.py                  # 400 MB a rank, 2 ranks
    python tools/bench_checkpoint.py --quick          # does everything run? half a minute
    python tools/bench_checkpoint.py --megabytes 2000 --folder /mnt/bb/$USER --json FILE

Savers, each a set of forked CPU ranks over gloo, take turns: A B C, A B C, ... A step is a number
of matrix products and an update that changes every element of the states. A turn makes long steps,
without and with a save in turns, in which every saver should come to its end; then short steps,
whose compute takes about as long as ours needs to write; then reads the states back and compares
them. Each saver keeps one checkpoint and deletes the one before.

The table, a row a saver, medians over saves and rounds, of a save's ranks the slowest:
    blocked       training was held up, when the save began and before the update
    durable       until the checkpoint was synced and complete for every rank; -: never
    compute       products that were computed until then, of what is computed in as much time
      meanwhile   without a save
    long step     with a save over the one without
    short steps   all with a save over as many without, until the last save is complete
    restore       until every rank has its states again, from an empty page cache; ours compares
                  digests
    of disk's     bytes a second of that, over what plain reads of 16 MiB reach, of all ranks at
      rate        once; the better of reads past and through the page cache
bare-writes is no saver: as many bytes from one buffer, by a thread that does nothing else. What
that takes from the computation, the machine takes from everybody who writes as fast.
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

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

import torch
import torch.distributed as dist
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from frontier_llm.errors import TrainingError
from frontier_llm.parallel.launcher import Launch, launch
from frontier_llm.parallel.world import World, init_process_group
from tools.bench import disk, machine
from tools.bench.checkpoint_results import MEGA, DiskOutcome, Outcome, make_table
from tools.bench.checkpoint_savers import SAVERS, TIMEOUT, Place
from tools.bench.checkpoint_turn import Rank, SaverFigures, SaverTurn, saver_figures_from
from tools.bench.disk import DiskFigures
from tools.console import wide_console
from tools.options import at_least, bench_parser, ending, parse_bench, positive

if TYPE_CHECKING:
    from torch.distributed import Store

QUICK = {"megabytes": 20.0, "rounds": 1, "saves": 1, "long_seconds": 0.4, "short_seconds": 0.1,
         "short_steps": 2, "restores": 1}  # fmt: skip
TABLE_WIDTH = 100
PROBE = "ours-blocking"
"""Its time to be durable is the compute of a short step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; return the exit code."""
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
    add("--megabytes", type=positive, default=400.0, help="of states a rank (default 400)")
    add("--ranks", type=at_least(1), default=2, help="that save together (default 2)")
    add("--savers", nargs="+", default=list(SAVERS), choices=list(SAVERS),
        help="that take turns (default all)")  # fmt: skip
    add("--saves", type=at_least(1), default=3, help="in long steps, a turn (default 3)")
    add("--long-seconds", type=positive, default=2.5, help="compute of a long step (default 2.5)")
    add("--short-seconds", type=positive,
        help=f"compute of a short step (default: what {PROBE} takes)")  # fmt: skip
    add("--short-steps", type=at_least(1), default=8, help="a turn (default 8)")
    add("--restores", type=at_least(0), default=3, help="a turn (default 3)")
    return parse_bench(parser, arguments, QUICK)


class Bench:
    """One run of the tool."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._disk = DiskOutcome()
        self._outcomes = [Outcome(name, SAVERS[name][0]) for name in options.savers]
        self._short_seconds = 0.0

    def run(self) -> int:
        """Have all take their turns; print and write what came out; return the exit code."""
        options = self._options
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        # No refresher thread: this process forks.
        with Progress(*columns, auto_refresh=False, transient=True) as progress:
            bar = progress.add_task("", total=options.rounds * (len(self._outcomes) + 1) + 1)

            def take(name: str, work: Callable[[], None]) -> None:
                progress.update(bar, description=name, refresh=True)
                work()
                progress.update(bar, advance=1, refresh=True)

            take(PROBE, self._probe)
            for _ in range(options.rounds):
                take("disk", self._take_disk)
                for outcome in self._outcomes:
                    take(outcome.saver, partial(self._take, outcome))
        self._report()
        return 1 if any(outcome.error for outcome in self._outcomes) else 0

    def _probe(self) -> None:
        """Measure how long a save of ours takes: so long a short step computes."""
        if self._options.short_seconds is not None:
            self._short_seconds = self._options.short_seconds
            return
        outcome = Outcome(PROBE, "", [self._turn(PROBE)])
        self._short_seconds = outcome.durable_seconds or 0.0

    def _take(self, outcome: Outcome) -> None:
        if outcome.error is None:
            try:
                outcome.rounds.append(self._turn(outcome.saver))
            except TrainingError as error:
                outcome.error = str(error)

    def _take_disk(self) -> None:
        size = round(self._options.megabytes * MEGA)

        def work(place: Place) -> DiskFigures:
            return disk.measure(place.folder, place.rank, size)

        self._disk.rounds.append([DiskFigures(**rank) for rank in self._fork(work)])

    def _turn(self, saver: str) -> list[SaverFigures]:
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
        """Have forked ranks do something in an empty folder; return what each brought home.

        Raises:
            TrainingError: one failed; its traceback has been printed.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            results, folder = Path(name, "results"), Path(name, "files")
            results.mkdir()
            folder.mkdir()

            def target(world: World, store: "Store") -> None:
                init_process_group(world, store, torch.device("cpu"), TIMEOUT)
                figures = work(Place(world.rank, world.size, store, folder))
                (results / f"{world.rank}.json").write_text(json.dumps(asdict(figures)))
                dist.barrier()  # nobody closes its sockets while another still reads from them

            ranks = self._options.ranks
            if code := launch(target, Launch(ranks=ranks, failure_dir=Path(name, "failures"))):
                raise TrainingError(f"its ranks ended with exit code {code}")
            return [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]

    def _report(self) -> None:
        options = self._options
        title = (
            f"{options.ranks} ranks with {options.megabytes:g} MB of states each; long steps of "
            f"{options.long_seconds:g} s, short ones of {self._short_seconds:.2f} s"
        )
        console = wide_console()
        console.width = max(console.width, TABLE_WIDTH)  # where output is no terminal
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
    sys.exit(ending(main))
