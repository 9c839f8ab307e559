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
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from benchmarks.harness import (
    MEGA,
    Contender,
    add_numbers,
    bench_parser,
    check_alike,
    compare,
    fixed,
    parse_bench,
    print_table,
    span,
    spread,
    threads_of,
    work_folder,
    write_json,
)
from benchmarks.own_loop import (
    CONTENDERS,
    SAVERS,
    SaveFigures,
    import_model,
    make,
    save_turn,
)
from benchmarks.peers.turn import Precision, Turn, TurnFigures, measure
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.shape import Shape
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
BASELINES = ("fsdp2", "fsdp2-prefetch")
"""Contenders that free parameters as the library does. The faster one is the baseline of ratios."""
LARGEST_DIFFERENCE: Mapping[Precision, float] = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest relative difference between the losses of two contenders in the same step. In bf16 the
contenders round sums of gradients differently."""
SPEED_COLUMNS = ("contender", "step\nms", "speed over\nbaseline", "sent\nMB", "counted\nMB",
                 "CPU\nms", "idle\n%", "other\ncores")  # fmt: skip
SAVE_COLUMNS = ("saver", "blocked\nms per step", "slowdown", "added\nms per step", "step\nms")
Speeds = Contender[TurnFigures]
Saves = Contender[list[SaveFigures]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse(arguments)
    import_model()
    speeds = [
        compare_speed(ranks, precision, options)
        for ranks in options.ranks
        for precision in options.precision
    ]
    saves = compare_saves(options) if options.savers else None
    write_json(options, {"speed": speeds, "saves": saves})
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
    add_numbers(parser, NUMBERS)
    return parse_bench(parser, arguments, QUICK)


def turn_of(
    name: str, options: argparse.Namespace, ranks: int, precision: Precision, steps: int
) -> Turn:
    """Return a contender's turn."""
    return Turn(name, ranks, precision, Shape.of(options), options.samples, 1, options.warmup,
                steps, threads_of(options, ranks))  # fmt: skip


def compare_speed(ranks: int, precision: Precision, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the contenders without saves, print their table and return the results.

    Raises:
        TrainingError: one failed, or their losses differ.
    """

    def take(name: str) -> TurnFigures:
        turn = turn_of(name, options, ranks, precision, options.steps)
        return TurnFigures.of(turn, on_ranks(measure, ranks, make, turn))

    turns = {name: partial(take, name) for name in CONTENDERS}
    outcomes = list(compare(turns, options.rounds).values())
    difference = check_losses(outcomes, precision)
    base = baseline_of(outcomes)
    rows = [speed_row(outcome, base) for outcome in outcomes]
    cells = [
        [row["contender"], span(row["step_seconds"], 0, 1000), span(row["speedup"]),
         fixed(row["sent_bytes"], 1, 1 / MEGA), fixed(row["counted_bytes"], 1, 1 / MEGA),
         fixed(row["cpu_seconds"], 0, 1000), fixed(row["idle_share"], 0, 100),
         fixed(row["other_cores"], 1)]
        for row in rows
    ]  # fmt: skip
    title = (
        f"{ranks} ranks, {precision}; baseline {base.name}; losses differ by at most "
        f"{difference:.1e} of the loss"
    )
    print_table(title, SPEED_COLUMNS, cells)
    return {"ranks": ranks, "precision": precision, "loss_difference": difference, "rows": rows}


def compare_saves(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the savers, print their table and return the results."""
    ranks, precision = options.ranks[0], options.precision[0]

    def take(name: str) -> list[SaveFigures]:
        with work_folder("bench_library", options.folder) as folder:
            turn = turn_of(name, options, ranks, precision, options.save_steps)
            return on_ranks(save_turn, ranks, turn, options.every, folder)

    outcomes = compare({name: partial(take, name) for name in options.savers}, options.rounds)
    rows = [save_row(outcome) for outcome in outcomes.values()]
    cells = [
        [row["saver"], span(row["blocked_seconds"], 1, 1000), span(row["slowdown"]),
         fixed(row["added_seconds"]["median"], 0, 1000),
         fixed(row["step_seconds"]["median"], 0, 1000)]
        for row in rows
    ]  # fmt: skip
    print_table(f"{ranks} ranks, {precision}, a save every {options.every} steps",
                SAVE_COLUMNS, cells)  # fmt: skip
    return {"ranks": ranks, "precision": precision, "every": options.every, "rows": rows}


def seconds_of(turn: TurnFigures) -> float:
    """Return the time of a step."""
    return turn.seconds


def baseline_of(outcomes: Sequence[Speeds]) -> Speeds:
    """Return the one of `BASELINES` whose median time is shorter."""
    found = [outcome for outcome in outcomes if outcome.name in BASELINES]
    return min(found, key=lambda outcome: outcome.median(seconds_of))


def speed_row(outcome: Speeds, base: Speeds) -> dict[str, Any]:
    """Return the figures of a contender without saves: medians over rounds of means over ranks."""
    names = {
        "sent_bytes": "tcp_bytes",
        "counted_bytes": "counted_bytes",
        "cpu_seconds": "cpu_seconds",
        "idle_share": "idle_share",
        "other_cores": "other_cores",
    }
    found = {key: [getattr(turn, name) for turn in outcome.rounds] for key, name in names.items()}
    return {
        "contender": outcome.name,
        "step_seconds": spread(outcome.values(seconds_of)),
        "baseline": base.name,
        "speedup": spread(base.ratios(outcome, seconds_of)),
        **{key: None if None in values else median(values) for key, values in found.items()},
        "losses": outcome.rounds[0].losses[0],
        "rounds": [asdict(turn) for turn in outcome.rounds],
    }


def save_row(outcome: Saves) -> dict[str, Any]:
    """Return the figures of a saver; the slowest rank counts for the time that saves block."""
    first = [ranks[0] for ranks in outcome.rounds]
    blocked = outcome.values(lambda ranks: max(rank.blocked_seconds for rank in ranks))
    return {
        "saver": outcome.name,
        "blocked_seconds": spread(blocked),
        "slowdown": spread([rank.step_seconds / rank.plain_step_seconds for rank in first]),
        "added_seconds": spread([rank.step_seconds - rank.plain_step_seconds for rank in first]),
        "step_seconds": spread([rank.step_seconds for rank in first]),
        "rounds": [[asdict(rank) for rank in ranks] for ranks in outcome.rounds],
    }


def check_losses(outcomes: Sequence[Speeds], precision: Precision) -> float:
    """Return the largest difference of all losses from those of the first contender.

    It is relative to the loss, over all contenders, rounds, ranks and steps.
    """
    series = [
        (outcome.name, list(chain(*turn.losses))) for outcome in outcomes for turn in outcome.rounds
    ]
    return check_alike(f"losses in {precision}", series, LARGEST_DIFFERENCE[precision])


if __name__ == "__main__":
    sys.exit(run_command(main))
