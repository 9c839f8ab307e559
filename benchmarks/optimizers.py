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
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.testbed import machine
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, run_command, tool_parser
from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.summary import RunSummary

ROOT = Path(__file__).resolve().parents[1]
RATES = {
    "adamw": (1e-3, 3e-3, 6e-3),
    "adamw_8bit": (1e-3, 3e-3, 6e-3),
    "muon": (1e-3, 3e-3, 6e-3),
    "adafactor": (1e-2, 3e-2),
}
"""Peak learning rates of each optimizer. Those of Adafactor are relative to the weights."""
COMMON_OVERRIDES = (
    "parallel.pipeline=1",
    "sharding=zero1",
    "precision=fp32",
    "launch.ranks=2",
    "data.global_batch=8",
    "data.micro_batch=4",
    "optimizer.schedule=cosine",
    "optimizer.timescale_steps=null",
    "optimizer.warmup_steps=20",
    "optimizer.clip_norm=1.0",
    "checkpoint=off",
    "telemetry.wandb=off",
    "telemetry.progress=false",
    "trainer.sample_tokens=0",
    "plan=off",
)
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

    def steps_to(self, loss: float) -> int | None:
        """Return the first validated step with a loss at most as high; None if there is none."""
        return next((step for step, found in self.validation if found <= loss), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=1000, help="steps per run")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "optimizers")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--quick", action="store_true", help="20 steps, one rate per optimizer")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of all runs")
    options = parser.parse_intermixed_args(arguments)
    steps = 20 if options.quick else options.steps
    outcomes = [
        run(optimizer, rate, steps, options)
        for optimizer, rates in RATES.items()
        for rate in (rates[:1] if options.quick else rates)
    ]
    best = [
        min((o for o in outcomes if o.optimizer == optimizer), key=lambda o: o.final)
        for optimizer in RATES
    ]
    wide_console().print(table(best))
    if options.json:
        facts = {"machine": machine.about(), "steps": steps, "overrides": list(COMMON_OVERRIDES)}
        runs = [asdict(outcome) for outcome in outcomes]
        options.json.write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n")
    return 0


def run(optimizer: str, rate: float, steps: int, options: argparse.Namespace) -> Outcome:
    """Train with one optimizer and rate, unless the run exists, and read what it found."""
    folder: Path = options.folder / f"{optimizer}_{rate:g}_{steps}"
    if RunSummary.read(folder) is None:
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            f"optimizer={optimizer}",
            *COMMON_OVERRIDES,
            f"optimizer.learning_rate={rate}",
            f"optimizer.minimum_learning_rate={rate / 10}",
            f"trainer.steps={steps}",
            f"trainer.evaluate_every_steps={max(1, steps // 40)}",
            f"run.dir={folder}",
            "run.resume=never",
            *options.overrides,
        ]
        print(f"{optimizer} at {rate:g}: {steps} steps", flush=True)
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise TrainingError(f"the run in {folder} failed: {' '.join(command)}")
    history = History.read(folder)
    found = RunSummary.read(folder)
    if found is None or not found.parameters:
        raise TrainingError(f"{folder} has no summary: remove it and repeat")
    moments = sum(rank.memory_bytes["moments"] for rank in found.ranks)
    return Outcome(
        optimizer=optimizer,
        rate=rate,
        validation=[(step, loss) for step, loss in history.points("validation_loss")],
        step_seconds=statistics.median(seconds for _, seconds in history.points("step_seconds")),
        moment_bytes=moments / found.parameters,
    )


def table(best: Sequence[Outcome]) -> Table:
    """Return the table of the best run of each optimizer."""
    wanted = next(outcome.final for outcome in best if outcome.optimizer == "adamw")
    result = Table(title=machine.about()["processor"])
    for column in (
        "optimizer", "rate", "last loss", "steps to AdamW's", "step", "bytes per parameter",
    ):  # fmt: skip
        result.add_column(column, justify="left" if column == "optimizer" else "right")
    for outcome in best:
        steps = outcome.steps_to(wanted)
        result.add_row(
            outcome.optimizer,
            f"{outcome.rate:g}",
            f"{outcome.final:.4f}",
            "never" if steps is None else str(steps),
            f"{1000 * outcome.step_seconds:.0f} ms",
            f"{outcome.moment_bytes:.2f}",
        )
    return result


if __name__ == "__main__":
    sys.exit(run_command(main))
