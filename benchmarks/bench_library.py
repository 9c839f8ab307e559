"""Compare frontier_llm as a library with torch's FSDP2 and checkpoints, in the same training loop.

    python -m benchmarks.bench_library            # 2 and 4 ranks, fp32 and bf16, 10 min
    python -m benchmarks.bench_library --quick    # a smoke test of ten seconds
    python -m benchmarks.bench_library --json library_<cpu>_<date>.json

Every contender trains the same Llama of transformers with the same random weights and samples, in
forked CPU ranks over gloo, and divides parameters, gradients and optimizer states over all ranks:
    library          frontier_llm.library.shard(params=N, grads=N, optimizer=N)
    fsdp2            torch.distributed.fsdp.fully_shard per layer and for the rest of the model
    fsdp2-prefetch   the same; each layer starts to gather the next one, as the library does
    fsdp2-keep       fsdp2 with reshard_after_forward=False: each layer stays gathered from its
                     forward to its backward pass, which needs memory for all parameters
All use a fused AdamW with fp32 master weights that decays matrices only, clip the norm of the
gradient at 1.0, use the same number of threads per rank, and tell malloc to keep freed memory.
In bf16, all compute in bf16, and gather parameters and send gradients in bf16. The library starts
with bf16 parameters (Formats.BF16) and sums gradients in fp32. FSDP2 has
MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16): gloo sums in bf16.

Contenders take turns: A B C, C B A, A B C, ... and a round is one turn of each. In a turn the ranks
start, warm up and time some steps. The losses of all steps are compared, in every round and on
every rank: they may differ by 0.01% of the loss in fp32, and by 0.5% in bf16.

The first tables have one row per contender. Values are medians over rounds, and means over ranks:
    step         time of a step, from barrier to barrier
    speed over   time of fsdp2 or of fsdp2-prefetch, whichever has the shorter median, divided by
                 the time of this contender in the same round
    sent MB      payload that a rank sends over TCP per step, as the kernel counts it
    counted MB   the same as the library counts it
    CPU ms       CPU time of a rank per step, with the threads of gloo
    idle %       idle share of all cores of the machine
    other cores  number of cores that other programs used

The last table compares savers. A turn times steps without saves, and then as many steps with a save
every few steps, until the last save is complete. One save before is not counted:
    library            frontier_llm.library.Checkpoints, which a thread writes
    dcp-save           torch.distributed.checkpoint.save of the model and the optimizer of fsdp2
    dcp-async          its async_save
    dcp-async-stager   its async_save with one DefaultStager for all saves, which copies the states
                       in a thread; the update waits for the copy
    blocked      time per step for which saves block the loop: calls, waits for copies before the
                 update, and waits for the previous save; the slowest rank counts
    slowdown     time of the steps with saves divided by the time of those without
    added        the difference of the two times, per step
All savers write the fp32 weights and both moments, and sync their files.
MB are millions of bytes.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from rich.console import Console

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.own_loop.library_results import (
    SaveOutcome,
    SpeedOutcome,
    baseline_of,
    check_losses,
    save_table,
    speed_table,
)
from benchmarks.own_loop.llama import Shape, import_model
from benchmarks.own_loop.loops import CONTENDERS, Precision
from benchmarks.own_loop.savers import SAVERS
from benchmarks.own_loop.turns import Steps, save_turn, speed_turn
from benchmarks.testbed import machine
from benchmarks.testbed.forked import on_ranks
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, run_command

QUICK = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 256, "sequence": 32, "ranks": [2],
         "rounds": 1, "warmup": 1, "steps": 2, "save_steps": 2, "every": 1}  # fmt: skip
"""Options of --quick."""
NUMBERS = (
    ("steps", 1, 3, "timed steps per turn without saves"),
    ("save-steps", 1, 8, "timed steps per turn with saves, and without them before"),
    ("every", 1, 4, "steps from one save to the next"),
    ("warmup", 1, 2, "steps before the timed ones"),
    ("layers", 1, 4, "layers of the model"),
    ("hidden", 1, 512, "hidden size"),
    ("heads", 2, 8, "attention heads; half as many heads of keys and values"),
    ("vocabulary", 1, 4096, "rows of the table of tokens"),
    ("sequence", 2, 256, "tokens per sample"),
    ("samples", 1, 2, "samples per rank and step"),
)
"""Integer options: name, minimum, default, help."""
TABLE_WIDTH = 100
"""Smallest width of the table in characters."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folders are removed
    import_model()
    console = wide_console()
    console.width = max(console.width, TABLE_WIDTH)  # for output that is not a terminal
    load = os.getloadavg()
    speeds = [
        compare_speed(ranks, precision, options, console)
        for ranks in options.ranks
        for precision in options.precision
    ]
    saves = compare_saves(options, console) if options.savers else None
    if options.json:
        facts = {
            **machine.about(),
            "options": {key: str(value) for key, value in vars(options).items()},
            "load_at_start": load,
            "load_at_end": os.getloadavg(),
            "speed": speeds,
            "saves": saves,
        }
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(
        __doc__, rounds=4, folder_for="folder of all checkpoints", quick="a tiny model, one round"
    )
    add = parser.add_argument
    add("--ranks", type=at_least(1), nargs="+", default=[2, 4], metavar="N",
        help="numbers of ranks (default 2 4); saves use the first")  # fmt: skip
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"],
        help="precision of the computation (default both); saves use the first")  # fmt: skip
    add("--savers", nargs="*", choices=SAVERS, default=list(SAVERS),
        help="savers to compare (default all); no name: no saves")  # fmt: skip
    add("--threads", type=at_least(1), metavar="N",
        help="CPU threads per rank (default: cores / ranks)")  # fmt: skip
    for name, least, default, meaning in NUMBERS:
        add(f"--{name}", type=at_least(least), default=default, metavar="N",
            help=f"{meaning} (default {default})")  # fmt: skip
    return parse_bench(parser, arguments, QUICK)


def compare_speed(
    ranks: int, precision: Precision, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Compare the contenders without saves, print their table and return the results.

    Raises:
        TrainingError: their losses differ.
        LaunchError: a contender failed.
    """
    outcomes = {name: SpeedOutcome(name) for name in CONTENDERS}
    steps = Steps(options.warmup, options.steps)
    shape, threads = shape_of(options), threads_of(options, ranks)
    for name in turns(CONTENDERS, options.rounds):
        outcomes[name].rounds.append(
            on_ranks(speed_turn, ranks, name, shape, precision, threads, steps)
        )
    difference = check_losses(list(outcomes.values()), precision)
    baseline = baseline_of(list(outcomes.values()))
    rows = [outcome.to_row(baseline) for outcome in outcomes.values()]
    title = f"{ranks} ranks, {precision}; losses differ by at most {difference:.1e} of the loss"
    console.print(speed_table(title, rows))
    return {"ranks": ranks, "precision": precision, "loss_difference": difference, "rows": rows}


def compare_saves(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare the savers, print their table and return the results."""
    ranks, precision = options.ranks[0], options.precision[0]
    steps = Steps(options.warmup, options.save_steps, options.every)
    outcomes = {name: SaveOutcome(name) for name in options.savers}
    shape, threads = shape_of(options), threads_of(options, ranks)
    for name in turns(options.savers, options.rounds):
        with tempfile.TemporaryDirectory(prefix="bench_library_", dir=options.folder) as folder:
            outcomes[name].rounds.append(
                on_ranks(save_turn, ranks, name, shape, precision, threads, steps, folder)
            )
    rows = [outcome.to_row() for outcome in outcomes.values()]
    console.print(
        save_table(f"{ranks} ranks, {precision}, a save every {options.every} steps", rows)
    )
    return {"ranks": ranks, "precision": precision, "every": options.every, "rows": rows}


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield the names of all turns; every second round is in the reverse order."""
    for index in range(rounds):
        yield from names[:: -1 if index % 2 else 1]


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the dimensions of the model."""
    return Shape(
        options.layers,
        options.hidden,
        options.heads,
        options.vocabulary,
        options.sequence,
        options.samples,
    )


def threads_of(options: argparse.Namespace, ranks: int) -> int:
    """Return the CPU threads per rank."""
    return options.threads or max(1, (os.cpu_count() or 1) // ranks)


if __name__ == "__main__":
    sys.exit(run_command(main))
