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
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import (
    ROOT,
    add_numbers,
    bench_console,
    bench_parser,
    make_table,
    parse_bench,
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


@dataclass(frozen=True)
class Outcome:
    """What one run found."""

    optimizer: str
    rate: float
    validation: list[tuple[int, float]]
    """Pairs of step and loss in nats per token."""
    step_seconds: float
    """Median over steps."""
    moment_bytes: float
    """Bytes of all states but the master weights per parameter, on all ranks together."""

    @property
    def final(self) -> float:
        """The last validation loss."""
        return self.validation[-1][1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = bench_parser(__doc__, quick="20 steps per run")
    add_numbers(parser, [("steps", 1, 1000, "steps per run")])
    folder = ROOT / "runs" / "optimizers"
    parser.add_argument("--folder", type=Path, default=folder, help="folder of the runs")
    options = parse_bench(parser, arguments, {"steps": 20})
    outcomes = [
        run(optimizer, rate, options) for optimizer, rates in RATES.items() for rate in rates
    ]
    best = {
        optimizer: min((o for o in outcomes if o.optimizer == optimizer), key=lambda o: o.final)
        for optimizer in RATES
    }
    goal = best["adamw"].final
    columns = ["optimizer", "rate", "last loss", "steps to AdamW's", "step", "bytes per parameter"]
    rows = []
    for outcome in best.values():
        steps = next((step for step, loss in outcome.validation if loss <= goal), "never")
        milliseconds = f"{1000 * outcome.step_seconds:.0f} ms"
        cells = (f"{outcome.rate:g}", f"{outcome.final:.4f}", str(steps), milliseconds)
        rows.append((outcome.optimizer, *cells, f"{outcome.moment_bytes:.2f}"))
    bench_console().print(make_table("Best rate of each optimizer", columns, rows))
    write_json(options, {"runs": [asdict(outcome) for outcome in outcomes]})
    return 0


def run(optimizer: str, rate: float, options: argparse.Namespace) -> Outcome:
    """Train with one optimizer and rate, unless the run exists, and read what it found."""
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
    moments = sum(rank.memory_bytes["moments"] for rank in found.ranks)
    return Outcome(
        optimizer=optimizer,
        rate=rate,
        validation=history.points("validation_loss"),
        step_seconds=statistics.median(seconds for _, seconds in history.points("step_seconds")),
        moment_bytes=moments / found.parameters,
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
