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

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.harness import (
    add_numbers,
    bench_parser,
    check_alike,
    fixed,
    parse_bench,
    print_table,
    ratios,
    write_json,
)
from benchmarks.pipeline.pipeline_rank import (
    Case,
    RankFigures,
    Schedule,
    TimedStep,
    run_case,
)
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.shape import Shape
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.geometry.pipeline_schedule import Action
from frontier_llm.geometry.pipeline_schedule import Schedule as PipelineSchedule
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.block import stage_activations
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.timeline import ActionSeconds, Send, simulate
from frontier_llm.units import MIB

QUICK = {"ranks": [2], "micro_batches": [2], "hidden": 64, "sequence": 32, "rounds": 1}
LIMIT_SECONDS = 1800
"""Time limit of a case, for busy machines."""
BASELINE = "1f1b"
"""The contender with which all others are compared."""
MEGATRON = {1: "megatron-1f1b", 2: "megatron-interleaved"}
"""megatron's contender, by model chunks per stage."""
NUMBERS = (
    ("layers", 2, 8, "layers of the model"),
    ("hidden", 1, 256, "width of the model"),
    ("heads", 1, 4, "attention heads"),
    ("vocabulary", 1, 1024, "tokens known"),
    ("sequence", 1, 256, "tokens per sample"),
    ("waiting", 1, 4, "weight gradients that may wait in *-waiting"),
)
COLUMNS = ("schedule", "ms", "over 1f1b", "over megatron", "simulated ms", "of measured",
           "peak MiB", "planned MiB")  # fmt: skip
TOLERANCE = 1e-4
"""Largest relative difference of losses and norms between contenders, which sum in other orders."""


Row = dict[str, Any]
"""Measurements of one contender in one case: the columns as medians over rounds, and all seconds;
the simulated values are None if the actions were not timed."""


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    return [
        row["contender"],
        fixed(row["seconds"], 1, 1e3),
        fixed(row["over_1f1b"], 3),
        fixed(row["over_megatron"], 3),
        fixed(row["simulated_seconds"], 1, 1e3),
        fixed(row["simulated_over_measured"], 3),
        fixed(row["peak_bytes"], 1, 1 / MIB),
        fixed(row["planned_bytes"], 1, 1 / MIB),
    ]


def make_rows(case: Case, latency: float, ranks: Sequence[dict[str, RankFigures]]) -> list[Row]:
    """Return the rows of a case, from the seconds of a message and what each rank has measured.

    Raises:
        TrainingError: the contenders did not train the same model.
    """
    check_equal(ranks[0])
    seconds = {
        name: [
            max(step.seconds for step in steps)
            for steps in zip(*(rank[name].steps for rank in ranks), strict=True)
        ]
        for name in case.contenders
    }
    rows = []
    for name, contender in case.contenders.items():
        figures = [rank[name] for rank in ranks]
        has_actions = all(step.actions for rank in figures for step in rank.steps)
        simulated = _simulated(case, contender, figures, latency) if has_actions else []
        of_measured = ratios(simulated, seconds[name])
        rows.append({
            "contender": name,
            "seconds": median(seconds[name]),
            "over_1f1b": median(ratios(seconds[name], seconds[BASELINE])),
            "over_megatron": median(ratios(seconds[name], seconds[MEGATRON[contender.chunks]])),
            "simulated_seconds": median(simulated) if simulated else None,
            "simulated_over_measured": median(of_measured) if simulated else None,
            "peak_bytes": max(rank.peak_bytes for rank in figures),
            "planned_bytes": planned_bytes(case, contender),
            "all_seconds": seconds[name],
        })  # fmt: skip
    return rows


def check_equal(figures: dict[str, RankFigures]) -> None:
    """Check that all contenders have the same losses and norms of gradients in every step.

    Raises:
        TrainingError: they differ, so the contenders do not train the same model.
    """
    series = {name: (*found.losses, *found.grad_norms) for name, found in figures.items()}
    base = series.pop(BASELINE)
    check_alike("losses or gradient norms", [(BASELINE, base), *series.items()], TOLERANCE)


def simulated_seconds(
    schedule: PipelineSchedule, steps: Sequence[TimedStep], latency: float
) -> float:
    """Simulate the passes of a step with the mean seconds that its own actions took.

    The rest of the step is added as it was measured. `steps` are those of each stage; `latency` are
    the seconds from the end of an action to the arrival of its result.
    """
    costs = [
        _mean_costs(actions, step.actions, schedule.placement.virtual_stages)
        for actions, step in zip(schedule.actions, steps, strict=True)
    ]
    events = simulate(schedule, costs, Send(hidden=latency))
    simulated = max(event.end for event in events)
    first = min(step.actions[0][0] for step in steps)
    last = max(step.actions[-1][1] for step in steps)
    return simulated + max(step.seconds for step in steps) - (last - first)


def planned_bytes(case: Case, contender: Schedule) -> int:
    """Return the memory that the planner predicts for the passes, on the rank with the most."""
    candidate = Candidate.of(case.config(contender), case.ranks, case.ranks)
    kinds = candidate.stages
    stages = [
        stage_activations(candidate, stage, kinds.by_stage[stage]) for stage in range(case.ranks)
    ]
    return max(one.kept + one.logits + one.working + one.exchange for one in stages)


def _simulated(
    case: Case, contender: Schedule, figures: Sequence[RankFigures], latency: float
) -> list[float]:
    """Return the simulated duration of each timed step; `figures` are those of each rank."""
    schedule = ResolvedLayout.resolve(case.config(contender), case.ranks, case.ranks).schedule
    return [
        simulated_seconds(schedule, steps, latency)
        for steps in zip(*(rank.steps for rank in figures), strict=True)
    ]


def _mean_costs(
    actions: Sequence[Action],
    times: Sequence[tuple[float, float]],
    virtual_stages: int,
) -> list[ActionSeconds]:
    """Return the mean seconds of each kind of action, by virtual stage; 0 if there was none."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for (kind, virtual_stage, _), (start, end) in zip(actions, times, strict=True):
        found[kind, virtual_stage].append(end - start)
    means = {key: fmean(durations) for key, durations in found.items()}
    return [
        ActionSeconds(*(means.get((kind, virtual_stage), 0.0) for kind in ActionSeconds._fields))
        for virtual_stage in range(virtual_stages)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each case, print its table, write the JSON; return the exit code."""
    parser = bench_parser(__doc__, rounds=3, quick="two ranks, a tiny model, one round")
    add = parser.add_argument
    add("--ranks", type=at_least(2), nargs="+", default=[2, 4], metavar="N",
        help="numbers of ranks, which are pipeline stages (default 2 4)")  # fmt: skip
    add("--micro-batches", type=at_least(1), nargs="+", default=[2, 4, 8, 16], metavar="N",
        help="numbers of micro-batches per step (default 2 4 8 16)")  # fmt: skip
    add_numbers(parser, NUMBERS)
    add("--recompute", choices=("none", "selective", "full"), default="none",
        help="what backward passes compute again (default none)")  # fmt: skip
    options = parse_bench(parser, arguments, QUICK)
    sizes = Shape.of(options)
    settings = {"waiting": options.waiting, "rounds": options.rounds,
                "recompute": options.recompute}  # fmt: skip
    results = []
    for ranks in options.ranks:
        for micro_batches in options.micro_batches:
            case = Case(ranks, micro_batches, sizes, **settings)
            found = on_ranks(run_case, ranks, case, limit_seconds=LIMIT_SECONDS)
            latency = found[0][0]
            rows = make_rows(case, latency, [figures for _, figures in found])
            title = f"{ranks} ranks on {os.cpu_count()} cores, {micro_batches} micro-batches"
            print_table(title, COLUMNS, map(cells, rows))
            numbers = {"ranks": ranks, "micro_batches": micro_batches, "message_seconds": latency}
            results.append({**numbers, "rows": rows})
    write_json(options, {"sizes": asdict(sizes), **settings, "cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
