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
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.checkpoint.saved_run import OURS, Phase, RunFigures, Schedule, Size, run
from benchmarks.checkpoint.savers import ASYNCHRONOUS, PEERS
from benchmarks.harness import (
    Contender,
    bench_console,
    bench_parser,
    fixed,
    make_table,
    parse_bench,
    span,
    spread,
    take_round,
    work_folder,
    write_json,
)
from benchmarks.testbed import disk
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.forked_run import corpus_of, import_training
from frontier_llm.cli.options import at_least, positive, run_command
from frontier_llm.errors import TrainingError
from frontier_llm.units import MIB

SAVERS, BASELINE = (OURS, *PEERS), "torch.save"
"""All savers, and the one with which the targets compare ours."""
QUICK = {"ranks": [2], "every": [1, 2], "rounds": 1, "megabytes": 2.0, "hidden": 64, "tokens": 64,
         "steps": 3}  # fmt: skip
COLUMNS = ("saver", "step\nms", "blocked\nms per save", "end to end\nms per step", "slowdown",
           "bound\nms per step", "bound by")  # fmt: skip
REPETITIONS = 3
"""Measurements of each rate; the shortest time counts, because a bound is wanted."""
MILLI = 1e-3
LARGEST_DIFFERENCE = 1e-6
"""Largest relative difference between the losses of two savers in the same step."""
END_TO_END_TARGET, PEER_TARGET, BLOCKED_TARGET = 2.2, 1.3, 1 / 48
"""Targets of our saver with a save after every step: the time of torch.save with fsync and of the
best asynchronous peer over its time; its blocked time over that of torch.save."""
Runs = Mapping[str, Sequence[RunFigures]]
"""The runs of each saver with the same number of ranks, by round."""


@dataclass(frozen=True)
class Rates:
    """Rates in bytes per second of all ranks together."""

    write: float
    """Writes of 16 MiB to one file per rank that bypass the page cache, with fsync."""
    copy: float
    """Copies from memory to memory that is allocated already."""


@dataclass(frozen=True)
class Limit:
    """A lower bound of the time of a step."""

    step_seconds: float
    """Time per step, with the share of a save."""
    cause: str
    """The part that sets this time."""


def measure_rates(ranks: int, rank_bytes: int, folder: Path) -> Rates:
    """Measure the rates on all ranks at once; `rank_bytes` are those of the states of a rank."""
    blocks = max(1, rank_bytes // disk.BLOCK_BYTES)
    times = on_ranks(_rank_seconds, ranks, folder, blocks)
    write, copy = (max(column) for column in zip(*times, strict=True))
    total = ranks * blocks * disk.BLOCK_BYTES
    return Rates(total / write, total / copy)


def limit_of(saver: str, every: int, plain_seconds: float, size: int, rates: Rates) -> Limit:
    """Return the lower bound of a step's time with a saver that saves every few steps.

    The bounds leave out serialisation, digests, agreement between ranks, and the cores and the
    memory bandwidth that the writer and the computation share.

    Args:
        saver: one of `SAVERS`.
        every: steps from one save to the next.
        plain_seconds: time of a step without saves.
        size: bytes of a checkpoint of all ranks.
        rates: the rates of the machine.
    """
    copy, write = size / rates.copy / every, size / rates.write / every
    if saver == OURS:  # chunks are written while the step computes
        return _overlapped(0.0, plain_seconds, write)
    if saver == "dcp-async-stager":  # a thread copies, then serialises into the page cache
        return _overlapped(0.0, plain_seconds, 2 * copy + write)
    if saver in ASYNCHRONOUS:  # training waits for the copy
        return _overlapped(copy, plain_seconds, copy + write)
    return Limit(plain_seconds + copy + write, "step and save")


def _overlapped(blocked: float, plain_seconds: float, background: float) -> Limit:
    cause = "step" if plain_seconds >= background else "disk"
    return Limit(blocked + max(plain_seconds, background), cause)


def _rank_seconds(rank: int, folder: Path, blocks: int) -> tuple[float, float]:
    """Return the seconds of writing and of copying as many blocks, with all other ranks."""
    path, buffer = folder / f"plain_{rank}", disk.filled_buffer()
    source = torch.ones(blocks * disk.BLOCK_BYTES // MIB, MIB, dtype=torch.uint8)
    target = torch.zeros_like(source)
    write = _shortest(lambda: disk.write_blocks(path, buffer, blocks))
    path.unlink()
    return write, _shortest(lambda: target.copy_(source))


def _shortest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPETITIONS):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Comparison:
    """All savers with one number of ranks and one interval between saves."""

    ranks: int
    every: int
    megabytes: float
    """Size of a checkpoint of all ranks in millions of bytes."""
    rows: list[dict[str, Any]]
    """Row of each saver; times in ms, as medians with minima and maxima over rounds."""
    targets: list[dict[str, Any]]
    """Name, target, measured ratio, predicted ratio, and whether it is met."""


def compare(
    ranks: int, runs: Runs, schedule: Schedule, limits: Mapping[tuple[str, int], Limit]
) -> list[Comparison]:
    """Return one comparison per phase with saves; `limits` are bounds by saver and interval."""
    size = next(iter(runs.values()))[0].states_bytes / 1e6
    plain = median(plain_seconds(runs, schedule))
    found = []
    for index, phase in enumerate(schedule.phases):
        if not phase.every:
            continue
        rows = [
            _row(saver, of_saver, phase, index, plain, limits[saver, phase.every])
            for saver, of_saver in runs.items()
        ]
        targets = _targets(rows) if phase.every == 1 else []
        found.append(Comparison(ranks, phase.every, size, rows, targets))
    return found


def check_losses(runs: Runs) -> float:
    """Return the largest relative difference between the losses of two runs.

    Raises:
        TrainingError: it is too large, so a saver has changed the training.
    """
    reference, *others = [run.losses for of_saver in runs.values() for run in of_saver]
    pairs = [pair for losses in others for pair in zip(reference, losses, strict=True)]
    difference = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    if not difference <= LARGEST_DIFFERENCE:
        raise TrainingError(f"the losses of two savers differ by {difference:.1e} of the loss")
    return difference


def table_of(comparison: Comparison) -> Table:
    """Return the table of all savers with one number of ranks and one interval."""
    steps = "every step" if comparison.every == 1 else f"every {comparison.every} steps"
    cells = [
        [row["saver"], *(span(row[key], 1) for key in ("step_ms", "blocked_ms", "end_to_end_ms")),
         span(row["slowdown"]), fixed(row["bound_ms"], 1), row["bound_by"]]
        for row in comparison.rows
    ]  # fmt: skip
    title = f"{comparison.ranks} ranks, {comparison.megabytes:.0f} MB saved {steps}"
    caption = "\n".join(_target_line(target) for target in comparison.targets)
    return make_table(title, COLUMNS, cells, caption=caption)


def plain_seconds(runs: Runs, schedule: Schedule) -> list[float]:
    """Return the time of a step without saves, for each run."""
    steps = schedule.phases[0].steps
    return [run.steps_seconds(0) / steps for of_saver in runs.values() for run in of_saver]


def _row(
    saver: str, runs: Sequence[RunFigures], phase: Phase, index: int, plain: float, limit: Limit
) -> dict[str, Any]:
    totals = [run.total_seconds(index) / phase.steps for run in runs]
    return {
        "saver": saver,
        "step_ms": _milliseconds([run.steps_seconds(index) / phase.steps for run in runs]),
        "blocked_ms": _milliseconds([run.blocked_seconds(index) for run in runs]),
        "end_to_end_ms": _milliseconds(totals),
        "slowdown": spread([total / plain for total in totals]),
        "bound_ms": limit.step_seconds / MILLI,
        "bound_by": limit.cause,
    }


def _targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare our saver with its targets; a peer that was not measured has no target."""
    by_saver = {row["saver"]: row for row in rows}
    if OURS not in by_saver:
        return []
    ours, found = by_saver[OURS], []
    peers = [row for row in rows if row["saver"] in ASYNCHRONOUS]
    if BASELINE in by_saver:
        base = by_saver[BASELINE]
        name = f"end to end, {BASELINE} over {OURS}"
        found.append(_target(name, END_TO_END_TARGET, base, ours, "end_to_end_ms"))
    if peers:
        best = min(peers, key=lambda row: float(row["end_to_end_ms"]["median"]))
        name = f"end to end, {best['saver']} over {OURS}"
        found.append(_target(name, PEER_TARGET, best, ours, "end_to_end_ms"))
    if BASELINE in by_saver:
        name = f"blocked, {BASELINE} over {OURS}"
        found.append(_target(name, 1 / BLOCKED_TARGET, base, ours, "blocked_ms"))
    return found


def _target(
    name: str, target: float, other: Mapping[str, Any], ours: Mapping[str, Any], key: str
) -> dict[str, Any]:
    pairs = zip(other[key]["all"], ours[key]["all"], strict=True)
    ratios = spread([theirs / own for theirs, own in pairs])
    bound = other["bound_ms"] / ours["bound_ms"] if key == "end_to_end_ms" else None
    return {
        "name": name,
        "target": target,
        "ratio": ratios,
        "ratio_of_bounds": bound,
        "is_met": ratios["median"] >= target,
    }


def _target_line(target: Mapping[str, Any]) -> str:
    bound = target["ratio_of_bounds"]
    bounds = "" if bound is None else f"; ratio of the bounds {bound:.2f}"
    verdict = "met" if target["is_met"] else "missed"
    ratio = span(target["ratio"])
    return f"{target['name']}: {ratio}, target {target['target']:.3g}: {verdict}{bounds}"


def _milliseconds(seconds: Sequence[float]) -> dict[str, Any]:
    return spread([value / MILLI for value in seconds])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse(arguments)
    import_training()
    # torchsnapshot is optional
    missing = [name for name in options.savers if name == "torchsnapshot"
               and importlib.util.find_spec(name) is None]  # fmt: skip
    with work_folder("checkpoint_in_training", options.folder) as folder:
        bench = Bench(options, folder, [name for name in options.savers if name not in missing])
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
        self._data = corpus_of(folder)
        self._cases: list[dict[str, Any]] = []
        self.errors: dict[str, str] = {}
        self._rates: dict[int, Rates] = {}
        self._console = bench_console()

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
                f"step: {bounds}"
            )

    def measure(self) -> None:
        """Run all rounds, or as many as fit into --minutes, but one for each number of ranks.

        The tables are printed and the JSON is written after each number of ranks.

        Raises:
            TrainingError: the losses of two savers differ.
        """
        end = self._start + 60 * self._options.minutes
        for ranks in self._options.ranks:
            size, schedule = self._size(ranks), self._schedule(ranks)

            place = self._data, self._folder / "run"
            contenders = [
                Contender(name, partial(run, name, size, schedule, *place)) for name in self._savers
            ]
            for index in range(self._options.rounds):
                start = time.monotonic()
                take_round(contenders, index)
                now = time.monotonic()
                self._console.print(f"{ranks} ranks, round {index + 1}: {now - start:.0f} s")
                if now + (now - start) > end and index + 1 < self._options.rounds:
                    self._console.print(f"{ranks} ranks: only {index + 1} rounds fit")
                    break
            for failed in (one for one in contenders if one.error is not None):
                self.errors[f"{ranks} ranks, {failed.name}"] = str(failed.error)
                self._console.print(failed.error, markup=False)
            if runs := {one.name: one.rounds for one in contenders if one.error is None}:
                self._report(ranks, runs)

    def _report(self, ranks: int, runs: Runs) -> None:
        """Print the tables of a number of ranks, and write the JSON of all results so far."""
        schedule = self._schedule(ranks)
        difference = check_losses(runs)
        plain = plain_seconds(runs, schedule)
        first = next(iter(runs.values()))
        limits = self._limits(ranks, min(plain), first[0].states_bytes)
        comparisons = compare(ranks, runs, schedule, limits)
        for comparison in comparisons:
            self._console.print(table_of(comparison))
        self._cases.append({
            "ranks": ranks,
            "rounds": len(first),
            "layers": self._size(ranks).layers,
            "rates": asdict(self._rates[ranks]),
            "loss_difference": difference,
            "plain_ms": _milliseconds(plain),
            "load": {saver: [found.load for found in runs[saver]] for saver in runs},
            "other_cores": {saver: [found.other_cores for found in runs[saver]] for saver in runs},
            "comparisons": [asdict(comparison) for comparison in comparisons],
        })  # fmt: skip
        seconds = time.monotonic() - self._start
        facts = {"wall_seconds": seconds, "errors": self.errors, "cases": self._cases}
        write_json(self._options, facts)

    def _limits(self, ranks: int, plain: float, size: int) -> dict[tuple[str, int], Limit]:
        """Return the lower bounds by saver and interval.

        `plain` is the time of a step without saves, `size` the bytes of a checkpoint of all ranks.
        """
        return {
            (saver, every): limit_of(saver, every, plain, size, self._rates[ranks])
            for saver in self._savers
            for every in self._intervals(ranks)
        }

    def _intervals(self, ranks: int) -> Sequence[int]:
        """Return the intervals between saves that are measured with a number of ranks."""
        every: Sequence[int] = self._options.every
        return every if ranks == self._options.ranks[0] else every[:1]

    def _schedule(self, ranks: int) -> Schedule:
        return Schedule.of(self._intervals(ranks), self._options.steps)

    def _size(self, ranks: int) -> Size:
        options = self._options
        return Size(ranks, options.megabytes, options.hidden, options.tokens)


if __name__ == "__main__":
    sys.exit(run_command(main))
