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

from benchmarks.checkpoint.saved_run import OURS, RunFigures, Schedule, Size, run
from benchmarks.checkpoint.savers import ASYNCHRONOUS, PEERS
from benchmarks.harness import (
    Contender,
    bench_parser,
    check_alike,
    fixed,
    parse_bench,
    print_table,
    ratios,
    span,
    spread,
    take_turns,
    work_folder,
    write_json,
)
from benchmarks.testbed import disk
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.forked_run import corpus_of, import_training
from frontier_lab.option_values import positive
from frontier_llm.cli.options import at_least, run_command
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
END_TO_END_TARGET, PEER_TARGET, BLOCKED_TARGET = 2.2, 1.3, 48
"""Targets of our saver with a save after every step: the time of torch.save with fsync and of the
best asynchronous peer over its time; the blocked time of torch.save over that of ours."""
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
    return min(disk.together(work) for _ in range(REPETITIONS))


def compare(
    runs: Runs, schedule: Schedule, limits: Mapping[tuple[str, int], Limit]
) -> list[dict[str, Any]]:
    """Return one comparison of all savers per phase with saves.

    `limits` are the bounds by saver and interval. Times in ms are spreads over rounds.
    """
    plain = median(plain_seconds(runs, schedule))
    found = []
    for index, phase in enumerate(schedule.phases):
        if not phase.every:
            continue
        rows = []
        for saver, of_saver in runs.items():
            steps, totals = (
                [run.slowest(index, name) / phase.steps for run in of_saver]
                for name in ("steps_seconds", "total_seconds")
            )
            limit = limits[saver, phase.every]
            rows.append({
                "saver": saver,
                "step_ms": _milliseconds(steps),
                "blocked_ms": _milliseconds([run.blocked_seconds(index) for run in of_saver]),
                "end_to_end_ms": _milliseconds(totals),
                "slowdown": spread([total / plain for total in totals]),
                "bound_ms": limit.step_seconds / MILLI,
                "bound_by": limit.cause,
            })  # fmt: skip
        targets = _targets(rows) if phase.every == 1 else []
        found.append({"every": phase.every, "rows": rows, "targets": targets})
    return found


def plain_seconds(runs: Runs, schedule: Schedule) -> list[float]:
    """Return the time of a step without saves, for each run."""
    steps = schedule.phases[0].steps
    return [run.slowest(0, "steps_seconds") / steps for some in runs.values() for run in some]


def _targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare our saver with its targets; a peer that was not measured has no target."""
    by_saver = {row["saver"]: row for row in rows}
    ours, base = by_saver.get(OURS), by_saver.get(BASELINE)
    best = min(
        (row for row in rows if row["saver"] in ASYNCHRONOUS),
        key=lambda row: float(row["end_to_end_ms"]["median"]),
        default=None,
    )
    found = []
    for what, other, target in (
        ("end to end", base, END_TO_END_TARGET),
        ("end to end", best, PEER_TARGET),
        ("blocked", base, BLOCKED_TARGET),
    ):
        if ours and other:
            key = f"{what.replace(' ', '_')}_ms"
            ratio = spread(ratios(other[key]["all"], ours[key]["all"]))
            bound = other["bound_ms"] / ours["bound_ms"] if what == "end to end" else None
            found.append({
                "name": f"{what}, {other['saver']} over {OURS}",
                "target": target,
                "ratio": ratio,
                "ratio_of_bounds": bound,
                "is_met": ratio["median"] >= target,
            })  # fmt: skip
    return found


def _target_line(target: Mapping[str, Any]) -> str:
    met, ratio = "met" if target["is_met"] else "missed", span(target["ratio"])
    bound = fixed(target["ratio_of_bounds"])
    return f"{target['name']}: {ratio}, target {target['target']}: {met}; of the bounds {bound}"


def _milliseconds(seconds: Sequence[float]) -> dict[str, Any]:
    return spread([value / MILLI for value in seconds])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse(arguments)
    import_training()
    savers = list(options.savers)
    if "torchsnapshot" in savers and importlib.util.find_spec("torchsnapshot") is None:
        savers.remove("torchsnapshot")
        print("torchsnapshot was left out: its package cannot be imported")
    start, cases, errors = time.monotonic(), [], {}
    with work_folder("checkpoint_in_training", options.folder) as folder:
        data = corpus_of(folder)
        for ranks in options.ranks:
            every = options.every if ranks == options.ranks[0] else options.every[:1]
            schedule = Schedule.of(every, options.steps)
            size = Size(ranks, options.megabytes, options.hidden, options.tokens)
            rates = measure_rates(ranks, round(options.megabytes * 1e6), folder)
            contenders = [
                Contender(name, partial(run, name, size, schedule, data, folder / "run"))
                for name in savers
            ]
            take_turns(contenders, options.rounds)
            for one in contenders:
                if one.error is not None:
                    errors[f"{ranks} ranks, {one.name}"] = one.error
                    print(one.error)
            if runs := {one.name: one.rounds for one in contenders if one.error is None}:
                cases.append(report(size, runs, schedule, rates))
            facts = {"wall_seconds": time.monotonic() - start, "errors": errors, "cases": cases}
            write_json(options, facts)
    return 1 if errors else 0


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
    return parse_bench(parser, arguments, QUICK)


def report(size: Size, runs: Runs, schedule: Schedule, rates: Rates) -> dict[str, Any]:
    """Print the tables of a number of ranks; return the results.

    Raises:
        TrainingError: the losses of two savers differ.
    """
    losses = [(name, run.losses) for name, of_saver in runs.items() for run in of_saver]
    difference = check_alike("losses", losses, LARGEST_DIFFERENCE)
    plain = plain_seconds(runs, schedule)
    first = next(iter(runs.values()))
    total = first[0].states_bytes
    limits = {
        (saver, phase.every): limit_of(saver, phase.every, min(plain), total, rates)
        for saver in runs
        for phase in schedule.phases
        if phase.every
    }
    comparisons = compare(runs, schedule, limits)
    for one in comparisons:
        cells = [
            [row["saver"],
             *(span(row[key], 1) for key in ("step_ms", "blocked_ms", "end_to_end_ms")),
             span(row["slowdown"]), fixed(row["bound_ms"], 1), row["bound_by"]]
            for row in one["rows"]
        ]  # fmt: skip
        title = f"{size.ranks} ranks, {total / 1e6:.0f} MB saved every {one['every']} steps"
        caption = "\n".join(map(_target_line, one["targets"]))
        print_table(title, COLUMNS, cells, caption=caption)
    return {
        "ranks": size.ranks,
        "rounds": len(first),
        "layers": size.layers,
        "megabytes": total / 1e6,
        "rates": asdict(rates),
        "loss_difference": difference,
        "plain_ms": _milliseconds(plain),
        "other_cores": {name: [one.other_cores for one in some] for name, some in runs.items()},
        "comparisons": comparisons,
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
