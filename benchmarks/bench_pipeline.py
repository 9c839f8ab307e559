"""Compare pipeline schedules: those of frontier_llm with each other and with megatron-core's.

    python -m benchmarks.bench_pipeline                       # on 2 and on 4 ranks
    python -m benchmarks.bench_pipeline --ranks 2 --micro-batches 8
    python -m benchmarks.bench_pipeline --quick               # smoke test
    python -m benchmarks.bench_pipeline --json benchmarks/results/pipeline_<cpu>_<date>.json

Each rank is one pipeline stage with one thread. All contenders train the same GPT in fp32 on the
same tokens with training steps of frontier_llm: passes, reductions and update. In a megatron-*
contender, megatron-core's schedule runs the passes of the same modules. Contenders take turns in
the same processes, and a barrier precedes each step. Losses and norms of gradients of all
contenders must be equal, or the benchmark fails.

There is one table per number of ranks and of micro-batches, with these columns:
    ms               duration of a step on the slowest rank, median over rounds
    over 1f1b        this duration divided by that of `1f1b`, median of the ratios of each round
    over megatron    the same for megatron's schedule with as many model chunks per stage
    simulated ms     duration that the planner simulates: from the mean seconds of each kind of
                     action in this step, by stage and model chunk, and from the seconds of a
                     message between idle ranks; the time before and after the passes is added as
                     measured
    of measured      simulated duration divided by the measured one
    peak MiB         memory of the tensors that live at once in the passes and were allocated in
                     them, on the rank with the most; measured in a step that is not timed
    planned MiB      what the planner predicts for it: activations and factors of weight gradients,
                     logits, temporary tensors and buffers of messages

The contenders *-waiting split backward passes and let weight gradients wait (`--waiting`). zb_h1,
zb_v and v_half follow their own rules. Contenders with two model chunks per stage take part only if
there are as many micro-batches as ranks.

If there are more ranks than cores, a rank that waits for a message leaves its core to another rank.
Schedules with short waits then gain less than with a core per rank, and the seconds of actions
include waiting for a core. Ratios between the same schedule of the two programs remain valid.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.table import Table

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.pipeline.pipeline_case import Case, Sizes
from benchmarks.pipeline.pipeline_rank import run_case
from benchmarks.pipeline.pipeline_results import Row, make_rows
from benchmarks.testbed import machine
from benchmarks.testbed.forked import on_ranks
from frontier_llm.cli.console import plain_table, wide_console
from frontier_llm.cli.options import at_least, run_command

QUICK = {"ranks": [2], "micro_batches": [2], "hidden": 64, "sequence": 32, "rounds": 1}
LIMIT_SECONDS = 1800
"""Time limit of a case, for busy machines."""
COLUMNS = ("schedule", "ms", "over 1f1b", "over megatron", "simulated ms", "of measured",
           "peak MiB", "planned MiB")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each case, print its table, write the JSON; return the exit code."""
    options = _parse(arguments)
    sizes = Sizes(options.layers, options.hidden, options.heads, options.vocabulary,
                  options.sequence)  # fmt: skip
    console, results = wide_console(), []
    for ranks in options.ranks:
        for micro_batches in options.micro_batches:
            case = Case(
                ranks, micro_batches, sizes, options.waiting, options.rounds, options.recompute
            )
            found = on_ranks(run_case, ranks, case, limit_seconds=LIMIT_SECONDS)
            latency = found[0][0]
            rows = make_rows(case, latency, [figures for _, figures in found])
            console.print(_table(case, rows))
            results.append(
                {
                    "ranks": ranks,
                    "micro_batches": micro_batches,
                    "message_seconds": latency,
                    "rows": [asdict(row) for row in rows],
                }
            )
    if options.json:
        settings = {
            "sizes": asdict(sizes),
            "waiting": options.waiting,
            "rounds": options.rounds,
            "recompute": options.recompute,
        }
        facts = {**machine.about(), **settings, "cases": results}
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, rounds=3, quick="two ranks, a tiny model, one round")
    add = parser.add_argument
    add("--ranks", type=at_least(2), nargs="+", default=[2, 4], metavar="N",
        help="numbers of ranks, which are pipeline stages (default 2 4)")  # fmt: skip
    add("--micro-batches", type=at_least(1), nargs="+", default=[2, 4, 8, 16], metavar="N",
        help="numbers of micro-batches per step (default 2 4 8 16)")  # fmt: skip
    add("--layers", type=at_least(2), default=8, help="layers of the model (default 8)")
    add("--hidden", type=at_least(1), default=256, help="width of the model (default 256)")
    add("--heads", type=at_least(1), default=4, help="attention heads (default 4)")
    add("--vocabulary", type=at_least(1), default=1024, help="tokens known (default 1024)")
    add("--sequence", type=at_least(1), default=256, help="tokens per sample (default 256)")
    add("--waiting", type=at_least(1), default=4, metavar="N",
        help="weight gradients that may wait in *-waiting (default 4)")  # fmt: skip
    add("--recompute", choices=("none", "selective", "full"), default="none",
        help="what backward passes compute again (default none)")  # fmt: skip
    return parse_bench(parser, arguments, QUICK)


def _table(case: Case, rows: Sequence[Row]) -> Table:
    cores, micro_batches = os.cpu_count(), case.micro_batches
    table = plain_table(f"{case.ranks} ranks on {cores} cores, {micro_batches} micro-batches", [])
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        table.add_row(
            row.contender,
            f"{row.seconds * 1e3:.1f}",
            f"{row.over_1f1b:.3f}",
            f"{row.over_megatron:.3f}",
            "" if row.simulated_seconds is None else f"{row.simulated_seconds * 1e3:.1f}",
            "" if row.simulated_over_measured is None else f"{row.simulated_over_measured:.3f}",
            f"{row.peak_bytes / 2**20:.1f}",
            f"{row.planned_bytes / 2**20:.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(run_command(main))
