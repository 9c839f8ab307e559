"""Compare the optimizers: steps to a loss, seconds per step, memory.

    python -m benchmarks.optimizers                    # gpt_tiny, 1,000 steps per run
    python -m benchmarks.optimizers --quick            # a smoke test
    python -m benchmarks.optimizers --json FILE

Trains gpt_tiny on the default corpus with each optimizer and several learning rates, two ranks with
sharding=zero1 in fp32. All runs have the same initial weights, samples and schedule (cosine). Runs
that exist under --folder are not repeated. Of each optimizer, the table shows the rate with the
lowest last validation loss: this loss; the first validated step with a loss at most as high as the
last one of AdamW; the median seconds of a step; and the bytes per parameter of all states but the
master weights.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    ROOT,
    add_numbers,
    bench_parser,
    parse_bench,
    print_table,
    train_run,
    write_json,
)
from frontier_llm.cli.options import run_command
from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.summary import RunSummary

RATES = {
    "adamw": (1e-3, 3e-3, 6e-3),
    "adamw_8bit": (1e-3, 3e-3, 6e-3),
    "muon": (1e-3, 3e-3, 6e-3),
    "adafactor": (1e-2, 3e-2),
}
"""Peak learning rates of each optimizer. Those of Adafactor are relative to the weights."""
OVERRIDES = (
    "parallel.pipeline=1", "sharding=zero1", "precision=fp32", "launch.ranks=2",
    "data.global_batch=8", "data.micro_batch=4", "optimizer.schedule=cosine",
    "optimizer.timescale_steps=null", "optimizer.warmup_steps=20", "optimizer.clip_norm=1.0",
    "checkpoint=off", "telemetry.wandb=off", "telemetry.progress=false", "trainer.sample_tokens=0",
    "plan=off", "run.resume=never",
)  # fmt: skip
"""Overrides of all runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = bench_parser(__doc__, quick="20 steps per run")
    add_numbers(parser, [("steps", 1, 1000, "steps per run")])
    folder = ROOT / "runs" / "optimizers"
    parser.add_argument("--folder", type=Path, default=folder, help="folder of the runs")
    options = parse_bench(parser, arguments, {"steps": 20})
    runs = [run(optimizer, rate, options) for optimizer, rates in RATES.items() for rate in rates]
    best = [min((one for one in runs if one["optimizer"] == name), key=_final) for name in RATES]
    goal = _final(best[0])
    rows = []
    for one in best:
        steps = next((step for step, loss in one["validation"] if loss <= goal), "never")
        rows.append(
            (one["optimizer"], f"{one['rate']:g}", f"{_final(one):.4f}", str(steps),
             f"{1000 * one['step_seconds']:.0f} ms", f"{one['moment_bytes']:.2f}")
        )  # fmt: skip
    columns = ["optimizer", "rate", "last loss", "steps to AdamW's", "step", "bytes per parameter"]
    print_table("Best rate of each optimizer", columns, rows)
    write_json(options, {"runs": runs})
    return 0


def _final(run: dict[str, Any]) -> float:
    """Return the last validation loss."""
    return float(run["validation"][-1][1])


def run(optimizer: str, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train with one optimizer and rate, unless the run exists, and read what it found.

    `validation` has pairs of step and loss in nats per token, `moment_bytes` the bytes of all
    states but the master weights per parameter, on all ranks together.
    """
    folder: Path = options.folder / f"{optimizer}_{rate:g}_{options.steps}"
    if RunSummary.read(folder) is None:
        keys = (
            f"optimizer={optimizer}", *OVERRIDES, f"optimizer.learning_rate={rate}",
            f"optimizer.minimum_learning_rate={rate / 10}", f"trainer.steps={options.steps}",
            f"trainer.evaluate_every_steps={max(1, options.steps // 40)}",
        )  # fmt: skip
        print(f"{optimizer} at {rate:g}: {options.steps} steps", file=sys.stderr, flush=True)
        train_run(keys, folder)
    history, found = History.read(folder), RunSummary.read(folder)
    if found is None or not found.parameters:
        raise TrainingError(f"{folder} has no summary: remove it and repeat")
    return {
        "optimizer": optimizer,
        "rate": rate,
        "validation": history.points("validation_loss"),
        "step_seconds": statistics.median(history.column("step_seconds")),
        "moment_bytes": sum(rank.memory_bytes["moments"] for rank in found.ranks)
        / found.parameters,
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
