"""Compare the planner with measured layouts on CPU ranks, after a calibration of this machine.

    python -m benchmarks.planner_layouts                     # all layouts, about five minutes
    python -m benchmarks.planner_layouts --layouts zero3 1f1b
    python -m benchmarks.planner_layouts --quick             # smoke test
    python -m benchmarks.planner_layouts --json benchmarks/results/planner_layouts_<cpu>_<date>.json

`frontier-llm calibrate` writes a cluster file into a temporary folder. The planner predicts each
layout on this cluster before the layout runs. Then two forked ranks with one thread each train it:
first two steps in which the memory of all tensors is followed (HeldBytes), from the first weight
on, then timed steps with a barrier before each. Layouts take turns, `--rounds` times.

    planned, measured     median duration of a step on the slower rank, over all rounds
    planned, measured     peak memory of tensors on the fuller rank; without the interpreter and the
                          slack of the allocator, which are no tensors
    planned, measured     peak resident memory of the process of the fuller rank
    error                 planned divided by measured, minus 1

The last line has the means of the absolute errors. Other programs must not run: before each turn
the benchmark waits up to `--patience` seconds for that, and steps during which others used more
than a tenth of a core do not count. A disturbed calibration is repeated. If all steps of a layout
were disturbed, all of them count, and the table says so.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from benchmarks.harness import (
    add_numbers,
    bench_parser,
    compare,
    fixed,
    parse_bench,
    print_table,
    write_json,
)
from benchmarks.testbed.bare_steps import (
    CPU,
    LEARNING_RATE,
    freeze_objects,
    prepare_cpu,
    random_batches,
)
from benchmarks.testbed.calibrated import calibrated_conf
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.held_bytes import HeldBytes
from benchmarks.testbed.shape import Shape
from frontier_lab.calibration.device import used_bytes
from frontier_lab.calibration.foreign_load import (
    busy_seconds,
    is_disturbed,
    own_seconds,
    wait_until_quiet,
)
from frontier_llm.cli.compose import compose
from frontier_llm.cli.options import run_command
from frontier_llm.config import RunConfig, decode
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.parallel.groups import make_groups
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate
from frontier_llm.trainer.states import bare_step
from frontier_llm.trainer.step_measurements import MEASURED_STEPS
from frontier_llm.units import MIB

RANKS = 2
"""Number of ranks of every layout, one per CPU core."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "replicated": ("sharding=replicated",),
    "zero1": ("sharding=zero1",),
    "zero2": ("sharding=zero2",),
    "zero3": ("sharding=zero3",),
    "zero3, quantised": ("sharding=zero3", "collectives=zeropp"),
    "zero1, bf16": ("sharding=zero1", "precision=bf16"),
    "zero2, recomputed": ("sharding=zero2", "recompute=full", "data.micro_batch=2"),
    "tensor": ("parallel.tensor=2",),
    "tensor, sequence": ("parallel.tensor=2", "parallel.sequence=true"),
    "1f1b": ("parallel.pipeline=2", "parallel.schedule=1f1b"),
    "interleaved": ("parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=interleaved"),
    "zb_v, bf16": (
        "parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=zb_v", "precision=bf16",
    ),
}  # fmt: skip
"""Overrides of each layout, by its name."""
NO_TENSORS = ("reserved", "communicators", "workspace", "slack")
"""Categories of planned memory that no tensor of the program holds."""
ATTEMPTS = 3
"""Most calibrations. The last one counts, even if other programs have computed meanwhile."""
NUMBERS = (
    ("layers", 2, 6, "layers of the model"),
    ("hidden", 1, 384, "width of the model"),
    ("heads", 1, 6, "attention heads"),
    ("vocabulary", 1, 4096, "tokens known"),
    ("sequence", 1, 256, "tokens per sample"),
    ("batch", 8, 8, "samples per step"),
    ("steps", 1, 5, "timed steps per turn"),
    ("patience", 0, 20, "seconds to wait for other programs before each turn"),
)
QUICK = {"layers": 4, "hidden": 64, "heads": 2, "vocabulary": 256, "sequence": 32, "steps": 1,
         "rounds": 1, "patience": 0}  # fmt: skip
COLUMNS = ("layout", "planned, ms", "measured, ms", "error", "planned, MiB", "measured, MiB",
           "error", "process, MiB", "measured, MiB", "error", "steps")  # fmt: skip


def config_of(layout: str, shape: Shape, batch: int, *overrides: str) -> RunConfig:
    """Return the configuration of a layout, with further overrides such as the cluster.

    `batch` are the samples per step of all ranks.
    """
    keys = ("model.tied=false", "data.micro_batch=1", f"data.global_batch={batch}",
            "parallel.pipeline=1", "parallel.waiting_weights=0", "precision=fp32",
            "recompute=none", "checkpoint=off")  # fmt: skip
    config: RunConfig = decode(compose([*shape.overrides(), *keys, *LAYOUTS[layout], *overrides]))
    return config


class TimedStep(NamedTuple):
    """One step on one rank."""

    seconds: float
    own: float
    """CPU seconds of this rank."""
    busy: float
    """Seconds that all cores of the machine worked together."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured of a layout."""

    peak_bytes: int
    """Peak memory of all tensors, from the first weight to the end of the second step."""
    process_bytes: int
    """Peak resident memory of the process."""
    steps: tuple[TimedStep, ...]
    phases: dict[str, float]
    """Seconds of each phase of a step, from the steps that the trainer itself measures."""
    losses: tuple[float, ...]


def run_layout(rank: int, config: RunConfig, steps: int) -> RankFigures:
    """Train on one rank: two steps in which the memory is measured, and `steps` timed ones.

    Collective over all ranks. The trainer's own timer measures the phases of the first timed steps.
    """
    prepare_cpu()
    layout = ResolvedLayout.resolve(config, RANKS, RANKS)
    groups = make_groups(layout.grid, layout.head_stage)
    batches, losses = random_batches(layout, groups.coordinates.data), []
    with HeldBytes() as held:
        _, step = bare_step(config, layout, groups, CPU)
        for number in (1, 2):
            losses.append(step.run(number, batches, LEARNING_RATE).loss)
    freeze_objects()
    timed = []
    for number in range(MEASURED_STEPS, MEASURED_STEPS + steps + 1):
        dist.barrier()
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        losses.append(step.run(number, batches, LEARNING_RATE).loss)
        seconds = time.perf_counter() - start
        timed.append(TimedStep(seconds, time.process_time() - own, busy_seconds() - busy))
    # the first of these steps is the last one that the trainer's timer measures
    process_bytes = int(used_bytes())
    return RankFigures(
        held.peak, process_bytes, tuple(timed[1:]), step.timer.laps[-1], tuple(losses)
    )


Row = dict[str, Any]
"""Planned and measured time and memory of a layout.

An error is the planned value divided by the measured one, minus 1. `seconds` is the median of the
counted steps on the slower rank, `all_seconds` are those of all timed steps. `peak_bytes` are those
of all tensors, `process_bytes` the resident memory of the process, both on the fuller rank; planned
bytes are those of the fullest stage, `by_category` those of tensors. `parts` are planned seconds by
kind of work, `phases` the measured ones of each phase of a step on rank 0, in one of the steps.
`is_disturbed`: other programs computed during every step, so that all steps count.
"""


def cells(row: Row) -> list[str]:
    """Return the row of the table."""
    found = [row["layout"]]
    for planned, measured, error, factor, digits in (
        ("planned_seconds", "seconds", "time_error", 1e3, 0),
        ("planned_bytes", "peak_bytes", "memory_error", 1 / MIB, 1),
        ("planned_process_bytes", "process_bytes", "process_error", 1 / MIB, 0),
    ):
        found += [fixed(row[key], digits, factor) for key in (planned, measured)]
        found.append(f"{row[error]:+.1%}")
    return [*found, "disturbed" if row["is_disturbed"] else str(row["counted_steps"])]


def make_row(layout: str, config: RunConfig, turns: Sequence[Sequence[RankFigures]]) -> Row:
    """Return the row of a layout from what the ranks have measured in each round."""
    planned = estimate(Candidate.of(config, RANKS, RANKS))
    every, counted = [], []
    for ranks in turns:
        for steps in zip(*(rank.steps for rank in ranks), strict=True):
            seconds, own = max(step.seconds for step in steps), sum(step.own for step in steps)
            every.append(seconds)
            if not is_disturbed(steps[0].busy, own, steps[0].seconds):
                counted.append(seconds)
    measured = median(counted or every)
    by_category = _tensors(planned)
    planned_bytes = sum(by_category.values())
    peak_bytes, process_bytes = (
        max(getattr(rank, name) for ranks in turns for rank in ranks)
        for name in ("peak_bytes", "process_bytes")
    )
    return {
        "layout": layout,
        "planned_seconds": planned.time.seconds,
        "seconds": measured,
        "time_error": planned.time.seconds / measured - 1,
        "planned_bytes": planned_bytes,
        "peak_bytes": peak_bytes,
        "memory_error": planned_bytes / peak_bytes - 1,
        "planned_process_bytes": planned.peak.total,
        "process_bytes": process_bytes,
        "process_error": planned.peak.total / process_bytes - 1,
        "counted_steps": len(counted or every),
        "is_disturbed": not counted,
        "parts": planned.time.parts,
        "phases": turns[0][0].phases,
        "by_category": by_category,
        "all_seconds": tuple(every),
    }


def _tensors(planned: Estimate) -> dict[str, int]:
    """Return the planned bytes of tensors by category, on the fullest stage."""
    stages = [
        {name: size for name, size in stage.by_category.items() if name not in NO_TENSORS}
        for stage in planned.memory
    ]
    return max(stages, key=lambda stage: sum(stage.values()))


def _calibrated(options: Namespace) -> dict[str, RunConfig]:
    """Calibrate this machine; return the configurations of layouts on it.

    The calibration is repeated a few times if other programs have computed meanwhile.
    """
    shape, patience = Shape.of(options), options.patience
    with HeldBytes():  # loads its libraries here: their memory is calibrated, too
        torch.empty(1)
    for attempt in range(ATTEMPTS):
        wait_until_quiet(patience)
        busy, own, start = busy_seconds(), own_seconds(), time.monotonic()
        with calibrated_conf(RANKS) as cluster:
            seconds = time.monotonic() - start
            disturbed = is_disturbed(busy_seconds() - busy, own_seconds() - own, seconds)
            if not disturbed or not patience or attempt + 1 == ATTEMPTS:
                return {
                    layout: config_of(layout, shape, options.batch, cluster)
                    for layout in options.layouts
                }
        print(f"other programs computed during calibration {attempt + 1}", file=sys.stderr)
    raise AssertionError("the last attempt returns")


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure the layouts, print the table, write the JSON; return the exit code."""
    parser = bench_parser(__doc__, rounds=2, quick="tiny layers, one step")
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME",
        help="names of layouts (default all): " + ", ".join(LAYOUTS),
    )  # fmt: skip
    add_numbers(parser, NUMBERS)
    options = parse_bench(parser, arguments, QUICK)
    configs = _calibrated(options)

    def turn(config: RunConfig) -> list[RankFigures]:
        wait_until_quiet(options.patience)
        return on_ranks(run_layout, RANKS, config, options.steps)

    turns = {name: partial(turn, config) for name, config in configs.items()}
    measured = compare(turns, options.rounds)
    rows = [make_row(name, configs[name], one.rounds) for name, one in measured.items()]
    means = ["mean of absolute errors"]
    for name in ("time_error", "memory_error", "process_error"):
        means += ["", "", f"{fmean(abs(row[name]) for row in rows):.1%}"]
    means.append("")
    title = f"{RANKS} ranks on {os.cpu_count()} cores"
    print_table(title, COLUMNS, [*map(cells, rows), means])
    cluster = next(iter(configs.values())).cluster.model_dump(mode="json")
    sizes = {**asdict(Shape.of(options)), "batch": options.batch}
    facts = {"sizes": sizes, "rounds": options.rounds, "steps": options.steps}
    write_json(options, {**facts, "cluster": cluster, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
