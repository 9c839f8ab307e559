"""Reproduce the study of mT5 (arXiv:2310.05350): seconds per step by model, ZeRO stage and nodes.

    python -m benchmarks.mt5_study                # predict it for A100 nodes (a minute)
    python -m benchmarks.mt5_study --run          # train mt5_tiny on ranks of this machine
    python -m benchmarks.mt5_study --json mt5_study.json

Predictions of the planner use the configurations of conf/experiment/mt5_*. With --run, mt5_tiny
trains a few steps for each ZeRO stage and number of ranks, and the median time per step is printed.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    add_numbers,
    bench_parser,
    print_table,
    train_run,
    write_json,
)
from frontier_llm.cli.compose import compose
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.estimate import estimate

MODELS = ("base", "large", "xl", "7b", "xxl")
"""Sizes of the models that are predicted: the names of the experiments after `mt5_`."""
STAGES = (1, 2, 3)
"""Stages of ZeRO."""
WARM_UP_STEPS = 3
"""First steps of a run, which are not counted."""
Cell = dict[str, Any]
"""A configuration: model, stage of ZeRO, size (nodes of a prediction, ranks of a run), and the
seconds of a step; None if it was rejected for a reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict or run, print the table, write JSON; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--run", action="store_true", help="train mt5_tiny on this machine")
    add("--nodes", type=sizes, default="1,2,4,8,16",
        help="numbers of nodes to predict (default: %(default)s)")  # fmt: skip
    add("--ranks", type=sizes, default="1,2,4",
        help="numbers of ranks of the runs (default: %(default)s)")  # fmt: skip
    add_numbers(parser, [("steps", 1, 10, "steps per run")])
    add("--folder", type=Path, default=Path("runs/study"), help="folder of the runs (%(default)s)")
    options = parser.parse_args(arguments)
    found = options.ranks if options.run else options.nodes
    cells = [
        measure(stage, size, options.steps, options.folder)
        if options.run
        else plan(model, stage, size)
        for model in (("tiny",) if options.run else MODELS)
        for stage in STAGES
        for size in found
    ]
    rows = []
    for first in range(0, len(cells), len(found)):
        row = cells[first : first + len(found)]
        seconds = (one["seconds"] for one in row)
        texts = ("rejected" if value is None else f"{value:.3g}" for value in seconds)
        rows.append([row[0]["model"], str(row[0]["stage"]), *texts])
    unit, how = ("ranks", "measured") if options.run else ("nodes", "predicted")
    columns = ["model", "ZeRO", *(f"{size} {unit}" for size in found)]
    print_table(f"seconds per step, {how}", columns, rows)
    for one in cells:
        if one["reason"]:
            print(f"{one['model']} ZeRO-{one['stage']} on {one['size']} {unit}: {one['reason']}")
    write_json(options, {"cells": cells})
    return 0


def sizes(text: str) -> list[int]:
    """Parse the value of an option: positive integers, separated by commas."""
    return [at_least(1)(part) for part in text.split(",")]


def plan(model: str, stage: int, nodes: int) -> Cell:
    """Predict the time per step of an experiment with another ZeRO stage and number of nodes."""
    overrides = [f"experiment=mt5_{model}", f"sharding=zero{stage}", f"launch.nodes={nodes}"]
    config = decode(compose(overrides))
    seconds, reason = None, ""
    try:
        prediction = estimate(Candidate.of(config, *ranks_to_plan(config)))
        reason = prediction.refused or ""
        seconds = None if reason else prediction.time.seconds
    except ConfigError as error:
        reason = f"{error.key}: {error.got}"
    name = config.model.name
    return {"model": name, "stage": stage, "size": nodes, "seconds": seconds, "reason": reason}


def measure(stage: int, ranks: int, steps: int, folder: Path) -> Cell:
    """Train mt5_tiny with data parallelism; return the median time per step after the warm-up.

    The precision is fp32 in all runs. Each run has a new folder below `folder`.

    Raises:
        TrainingError: the run failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp(prefix=f"zero{stage}_{ranks}_", dir=folder)).absolute()
    keys = [
        "model=mt5_tiny", "data=stdlib_spans", f"sharding=zero{stage}", "parallel.pipeline=1",
        f"launch.ranks={ranks}", "precision=fp32", f"trainer.steps={steps + WARM_UP_STEPS}",
        "trainer.sample_tokens=0", "checkpoint=off", "telemetry.wandb=off", "run.resume=never",
    ]  # fmt: skip
    seconds = statistics.median(train_run(keys, run_dir).column("step_seconds")[WARM_UP_STEPS:])
    return {"model": "mt5_tiny", "stage": stage, "size": ranks, "seconds": seconds, "reason": ""}


if __name__ == "__main__":
    sys.exit(run_command(main))
