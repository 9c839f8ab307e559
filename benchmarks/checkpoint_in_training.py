"""Train with the engine of `frontier-llm train`, and let several savers write the checkpoints.

    python -m benchmarks.checkpoint_in_training                # 1, 2 and 4 ranks, 17 minutes
    python -m benchmarks.checkpoint_in_training --quick        # a smoke test of half a minute
    python -m benchmarks.checkpoint_in_training --folder /mnt/bb/$USER --json FILE

A GPT learns source code in fp32 on CPU ranks with one thread each (sharding=zero1). The model grows
with the number of ranks, so that each rank saves the same number of bytes: weights and both
moments. There are few tokens per step (at least 8 per rank), so that a step is about as long as the
disk needs for a checkpoint. The savers:
    ours               checkpoint=lazy: one thread copies the states during the next step, another
                       writes the copies
    torch.save         torch.save and fsync of a file per rank, then a barrier
    dcp                torch.distributed.checkpoint.save
    dcp-async          its async_save, which copies the states and then writes in a thread
    dcp-async-stager   the same with one DefaultStager for all saves: a thread copies, into memory
                       that the next save reuses. Memory is not pinned, because there is no GPU
    two-phase          like CheckFreq: a copy to memory that is allocated once; a thread writes it
                       with torch.save and fsync; the next copy waits for that
    torchsnapshot      Snapshot.async_take, then fsync; only if its package can be imported. Install
                       it into a folder of its own: pip install --target DIR torchsnapshot, and set
                       PYTHONPATH=DIR
DataStates-LLM's own engine needs CUDA and is not compared. All savers sync their files and keep one
checkpoint. In the warm-up of every run a checkpoint is restored after two more updates, and
compared with a copy of the states. The losses of all savers must be equal.

A run has a phase without saves, and one phase per interval between saves. Savers take turns, in the
reverse order in every second round. Values are medians over rounds, with minima and maxima; the
slowest rank counts:
    step         time of a step with its share of saves
    blocked      time for which a save blocks training: its start and the fence before the update
    end to end   time per step until the last checkpoint of the phase is durable on all ranks
    slowdown     the same, divided by the median time of a step without saves in all runs
    bound        lower bound of `end to end`, from the fastest step without saves, the rate at which
                 all ranks write blocks of 16 MiB with fsync, and the rate at which they copy memory
Both rates are measured, and the bounds are printed, before the savers run.
Intervals above 1 are measured with the first number of ranks only.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.faults.kill_loop import write_corpus
from benchmarks.saved_training import training_results
from benchmarks.saved_training.save_limits import Limit, Rates, limit_of, measure_rates
from benchmarks.saved_training.save_phases import Schedule, schedule_of
from benchmarks.saved_training.training_runs import RunFigures, Size, run
from benchmarks.saved_training.training_savers import OURS, SAVERS, missing_package
from benchmarks.testbed import machine
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, positive, run_command
from frontier_llm.errors import TrainingError

QUICK = {"ranks": [2], "every": [1, 2], "rounds": 1, "megabytes": 2.0, "hidden": 64, "tokens": 64,
         "steps": 3}  # fmt: skip
"""Options of --quick."""
TABLE_WIDTH = 120
"""Smallest width of the table in characters."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed
    for module in ("frontier_llm.cli.train", "frontier_llm.trainer.assemble"):
        importlib.import_module(module)  # once, before the forks
    missing = [name for name in options.savers if missing_package(name)]
    with tempfile.TemporaryDirectory(prefix="checkpoint_in_training_", dir=options.folder) as name:
        bench = Bench(options, Path(name), [s for s in options.savers if s not in missing])
        bench.predict()
        bench.measure()
    for saver in missing:
        print(f"{saver} was left out: its package cannot be imported")
    return 1 if bench.errors else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(
        __doc__, rounds=3, folder_for="folder of all checkpoints", quick="a tiny model, one round"
    )
    add = parser.add_argument
    add("--ranks", type=at_least(1), nargs="+", default=[1, 2, 4], metavar="N",
        help="numbers of data-parallel ranks (default 1 2 4)")  # fmt: skip
    add("--every", type=at_least(1), nargs="+", default=[1, 2, 5, 10, 20], metavar="N",
        help="steps between saves (default 1 2 5 10 20)")  # fmt: skip
    add("--savers", nargs="+", choices=SAVERS, default=list(SAVERS),
        help="savers to compare (default all)")  # fmt: skip
    add("--megabytes", type=positive, default=105.0, help="least states per rank (default 105)")
    add("--hidden", type=at_least(64), default=512, help="hidden size (default 512)")
    add("--tokens", type=at_least(8), default=16, help="tokens per step (default 16)")
    add("--steps", type=at_least(2), default=12, help="least steps of a phase (default 12)")
    add("--minutes", type=positive, default=20.0,
        help="begin no round that would end later (default 20)")  # fmt: skip
    return parse_bench(parser, arguments, QUICK)


class Bench:
    """One run of the benchmark.

    Attributes:
        errors: why a saver failed, by number of ranks and saver. Its measurements with this number
            of ranks are dropped.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, savers: Sequence[str]) -> None:
        self._options, self._folder, self._savers = options, folder, savers
        self._start = time.monotonic()
        self._data = (f"data.path={write_corpus(folder)}", f"data.directory={folder}/corpora")
        self._cases: list[dict[str, Any]] = []
        self.errors: dict[str, str] = {}
        self._rates: dict[int, Rates] = {}
        self._console = wide_console()
        self._console.width = max(self._console.width, TABLE_WIDTH)

    def predict(self) -> None:
        """Measure the rates and a step without saves, and print the bounds of all savers."""
        for ranks in self._options.ranks:
            schedule = Schedule(self._schedule(ranks).phases[:1])
            probe = run(OURS, self._size(ranks), schedule, self._data, self._folder / "run")
            step = probe.steps_seconds(0) / schedule.phases[0].steps
            size = probe.states_bytes
            self._rates[ranks] = rates = measure_rates(ranks, size // ranks, self._folder)
            limits = self._limits(ranks, step, size)
            bounds = ", ".join(
                f"{saver} {limits[saver, self._options.every[0]].step_seconds:.3f} s"
                for saver in self._savers
            )
            self._console.print(
                f"{ranks} ranks: {size / 1e6:.0f} MB per save, a step of {step:.3f} s, writes of "
                f"{rates.write / 1e9:.2f} GB/s, copies of {rates.copy / 1e9:.1f} GB/s; bounds of a "
                f"step: {bounds}",
                highlight=False,
            )

    def measure(self) -> None:
        """Run all rounds, or as many as fit into --minutes, but one for each number of ranks.

        The tables are printed and the JSON is written after each number of ranks.

        Raises:
            TrainingError: the losses of two savers differ.
        """
        end = self._start + 60 * self._options.minutes
        for ranks in self._options.ranks:
            runs: dict[str, list[RunFigures]] = {saver: [] for saver in self._savers}
            for index in range(self._options.rounds):
                start = time.monotonic()
                self._round(ranks, runs, -1 if index % 2 else 1)
                now = time.monotonic()
                text = f"{ranks} ranks, round {index + 1}: {now - start:.0f} s"
                self._console.print(text, highlight=False)
                if now + (now - start) > end and index + 1 < self._options.rounds:
                    self._console.print(f"{ranks} ranks: only {index + 1} rounds fit")
                    break
            if runs:
                self._report(ranks, runs)

    def _round(self, ranks: int, runs: dict[str, list[RunFigures]], order: int) -> None:
        """Run one turn of each saver that has not failed.

        Args:
            ranks: number of ranks.
            runs: the measurements by saver, to which this method adds.
            order: 1, or -1 for the reverse order of the savers.
        """
        size, schedule, folder = self._size(ranks), self._schedule(ranks), self._folder / "run"
        for saver in list(runs)[::order]:
            try:
                runs[saver].append(run(saver, size, schedule, self._data, folder))
            except TrainingError as error:
                del runs[saver]
                self.errors[f"{ranks} ranks, {saver}"] = str(error)
                self._console.print(str(error), highlight=False, markup=False)

    def _report(self, ranks: int, runs: training_results.Runs) -> None:
        """Print the tables of a number of ranks, and write the JSON of all results so far."""
        schedule = self._schedule(ranks)
        difference = training_results.check_losses(runs)
        plain = training_results.plain_steps(runs, schedule)
        size = next(iter(runs.values()))[0].states_bytes
        limits = self._limits(ranks, plain["min"] * training_results.MILLI, size)
        comparisons = training_results.compare(ranks, runs, schedule, limits)
        for comparison in comparisons:
            self._console.print(training_results.make_table(comparison))
        self._cases.append({
            "ranks": ranks,
            "rounds": len(next(iter(runs.values()))),
            "layers": self._size(ranks).layers,
            "rates": asdict(self._rates[ranks]),
            "loss_difference": difference,
            "plain_ms": plain,
            "load": {saver: [found.load[0] for found in runs[saver]] for saver in runs},
            "other_cores": {saver: [found.other_cores for found in runs[saver]] for saver in runs},
            "comparisons": [asdict(comparison) for comparison in comparisons],
        })  # fmt: skip
        if self._options.json:
            facts = {
                **machine.about(),
                "options": {key: str(value) for key, value in vars(self._options).items()},
                "wall_seconds": time.monotonic() - self._start,
                "errors": self.errors,
                "cases": self._cases,
            }
            self._options.json.write_text(json.dumps(facts, indent=1) + "\n")

    def _limits(self, ranks: int, plain_seconds: float, size: int) -> dict[tuple[str, int], Limit]:
        """Return the lower bounds by saver and interval.

        Args:
            ranks: number of ranks.
            plain_seconds: time of a step without saves.
            size: bytes of a checkpoint of all ranks.
        """
        return {
            (saver, every): limit_of(saver, every, plain_seconds, size, self._rates[ranks])
            for saver in self._savers
            for every in self._intervals(ranks)
        }

    def _intervals(self, ranks: int) -> Sequence[int]:
        """Return the intervals between saves that are measured with a number of ranks."""
        every: Sequence[int] = self._options.every
        return every if ranks == self._options.ranks[0] else every[:1]

    def _schedule(self, ranks: int) -> Schedule:
        steps = self._options.steps
        return schedule_of(self._intervals(ranks), steps, steps)

    def _size(self, ranks: int) -> Size:
        options = self._options
        return Size(ranks, options.megabytes, options.hidden, options.tokens)


if __name__ == "__main__":
    sys.exit(run_command(main))
