"""Compare the convergence of training with and without quantised collectives.

    python -m benchmarks.convergence                  # train what is missing, draw, print

Trains gpt_tiny on the default corpus with several presets of `collectives=`, the formats in which
states are sent, and with several seeds. Each run has four ranks on two simulated nodes, with
sharding=zeropp in fp32. Runs with the same seed have the same initial weights and samples, and take
turns of --slice steps. Each run has a folder under --folder and resumes from its newest checkpoint,
also when this program was interrupted and is called again.

Any change of the arithmetic makes two runs diverge. The run `perturbed` shows by how much: it is
the run `plain` with initial weights that are 1% larger. A preset has an effect only if it differs
more from `plain` than `perturbed` does. All validation losses are written to --json, and the curves
are drawn to --picture.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import (
    ROOT,
    add_numbers,
    bench_parser,
    print_table,
    train_run,
    write_json,
)
from docs.generate.blocks import RESULTS
from docs.generate.drawing import GRID, IMAGES, panels, svg
from frontier_lab.option_values import new_file, write_text
from frontier_llm.cli.options import run_command
from frontier_llm.telemetry.history import History

RUNS = {
    "plain": ("collectives=plain",),
    "perturbed": ("collectives=plain", "model.init_std=0.0202"),
    "zeropp": ("collectives=zeropp",),
    "zeropp_feedback": ("collectives=zeropp_feedback",),
    "four_bits": ("collectives=four_bits",),
    "four_bits_128": ("collectives=four_bits", "collectives.block_elements=128"),
    "four_bits_256": ("collectives=four_bits", "collectives.block_elements=256"),
    "bf16_feedback_256": (
        "collectives=four_bits",
        "collectives.block_elements=256",
        "collectives.feedback_format=bf16",
    ),
    "differences": (
        "collectives=plain",
        "collectives.refresh_format=int4",
        "collectives.refresh_differences=true",
        "collectives.refresh_full_every=50",
    ),
    "grads_int8": (
        "collectives=plain",
        "collectives.grads_format=int8",
        "collectives.grads_across_format=int8",
    ),
    "grads_int4": (
        "collectives=plain",
        "collectives.grads_format=int8",
        "collectives.grads_across_format=int4",
        "collectives.rotation_elements=64",
    ),
}
"""Overrides of each kind of run."""
BY_DEFAULT = ("plain", "perturbed", "zeropp", "zeropp_feedback", "four_bits")
COLOURS = (
    "#475569", "#94a3b8", "#d97706", "#2563eb", "#059669", "#65a30d", "#ca8a04", "#db2777",
    "#0891b2", "#7c3aed", "#dc2626",
)  # fmt: skip
"""Colour of each kind of run."""
COMMON_OVERRIDES = (
    "parallel.pipeline=1", "data.global_batch=8", "data.micro_batch=2",
    # with a larger learning rate, small changes of the arithmetic make runs diverge much more
    "optimizer.learning_rate=3e-4", "optimizer.minimum_learning_rate=3e-5",
    "sharding=zeropp", "precision=fp32", "launch.ranks=4", "launch.ranks_per_node=2",
    "telemetry.wandb=off", "telemetry.progress=false", "trainer.sample_tokens=0",
)  # fmt: skip
"""Overrides of all runs."""


Points = Sequence[tuple[int, float]]
"""Pairs of step and value."""


@dataclass(frozen=True)
class Curve:
    """Validation losses of one run so far, in nats per token."""

    run: str
    """A key of RUNS."""
    seed: int
    steps: int
    """Number of completed steps."""
    validation: Points

    @classmethod
    def read(cls, run: str, seed: int, folder: Path) -> "Curve":
        """Read the metrics of a run; the folder may be absent."""
        history = History.read(folder)
        return cls(run, seed, max(history.steps, default=0), history.points("validation_loss"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, draw the curves, write and print losses; return the exit code."""
    options = parse(arguments)
    seeds = range(1, options.seeds + 1)
    goals = [*range(options.slice, options.steps, options.slice), options.steps]
    for seed, goal, run in product(seeds, goals, options.runs):
        folder = options.folder / run / f"seed_{seed}"
        done = Curve.read(run, seed, folder).steps
        if done < goal:
            print(f"{run}, seed {seed}: steps {done + 1} to {goal}", flush=True)
            keys = f"trainer.seed={seed}", f"trainer.steps={goal}"
            train_run((*common(options), *RUNS[run], *keys), folder)
    curves = [
        Curve.read(run, seed, options.folder / run / f"seed_{seed}")
        for run, seed in product(options.runs, seeds)
    ]
    write_text(options.picture, svg(lambda: draw(curves)), "--picture")
    facts = {
        "command": " ".join(["train.py", *common(options)]),
        "of each run": {run: " ".join(RUNS[run]) for run in options.runs},
        "curves": [vars(curve) for curve in curves],
    }
    write_json(options, facts)
    headings = ("run", "steps", "validation loss", "difference from plain", "standard error",
                "by seed", "all validations")  # fmt: skip
    print_table("Last validation losses", headings, rows(curves))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    numbers = [
        ("steps", 1, 1000, "steps per run"),
        ("slice", 1, 250, "steps per turn"),
        ("every", 1, 50, "steps between two validations"),
        ("seeds", 1, 2, "runs per kind, with seeds from 1 on"),
    ]
    add_numbers(parser, numbers)
    add("--folder", type=Path, default=ROOT / "runs" / "convergence", help="folder of the runs")
    add("--picture", type=new_file, default=IMAGES / "convergence.svg",
        help="SVG file for the curves (%(default)s)")  # fmt: skip
    add("--runs", nargs="+", choices=RUNS, default=list(BY_DEFAULT),
        help=f"kinds of runs (default {' '.join(BY_DEFAULT)})")  # fmt: skip
    add("overrides", nargs="*", metavar="key=value", help="overrides for all runs")
    parser.set_defaults(json=RESULTS / "convergence.json")
    return parser.parse_intermixed_args(arguments)


def common(options: argparse.Namespace) -> list[str]:
    """Return the overrides of all runs."""
    steps = f"optimizer.decay_steps={options.steps}"
    every = f"trainer.evaluate_every_steps={options.every}"
    return [*COMMON_OVERRIDES, steps, every, *options.overrides]


def rows(curves: Sequence[Curve]) -> Iterator[list[str]]:
    """Yield the rows of the table; the last cell is the mean over all validations and seeds."""
    for run in dict.fromkeys(curve.run for curve in curves):
        of_run = [curve for curve in curves if curve.run == run and curve.validation]
        series = [points for curve in of_run if (points := differences(curve, curves))]
        last = [points[-1][1] for points in series]
        every = [value for points in series for _, value in points]
        error = f"{stdev(last) / math.sqrt(len(last)):.2f}%" if len(last) > 1 else ""
        yield [
            run,
            str(min((curve.steps for curve in of_run), default=0)),
            f"{fmean(curve.validation[-1][1] for curve in of_run):.4f}" if of_run else "",
            f"{fmean(last):+.2f}%" if last else "",
            error,
            ", ".join(f"{value:+.2f}%" for value in last),
            f"{fmean(every):+.3f}%" if every else "",
        ]


def differences(curve: Curve, curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """Return the difference in percent from the plain run of the same seed, at common steps."""
    is_plain = (c.validation for c in curves if c.run == "plain" and c.seed == curve.seed)
    plain = dict(next(is_plain, []))
    return [
        (step, 100 * (loss / plain[step] - 1)) for step, loss in curve.validation if step in plain
    ]


def means(series: Sequence[Points]) -> list[tuple[int, float]]:
    """Return the mean of several curves at their common steps."""
    shared = set.intersection(*(set(dict(points)) for points in series)) if series else set()
    return [(step, fmean(dict(points)[step] for points in series)) for step in sorted(shared)]


def draw(curves: Sequence[Curve]) -> Figure:
    """Draw the validation losses, and their differences from the run `plain`."""
    figure, (left, right) = panels((9.6, 3.6), "", "", gap=0.25)
    for run in dict.fromkeys(curve.run for curve in curves):
        of_run = [curve for curve in curves if curve.run == run]
        _draw_runs(left, run, [curve.validation for curve in of_run])
        if run != "plain":
            _draw_runs(right, run, [differences(curve, curves) for curve in of_run])
    for bound in (1.0, 0.3, -0.3, -1.0):  # percent, to compare the curves with
        right.axhline(bound, color=GRID, linewidth=0.8, linestyle="--")
    left.set(xlabel="step", ylabel="nats per token")
    left.set_title("Validation loss")
    right.set(xlabel="step", ylabel="percent")
    right.set_title("Difference from plain of the same seed")
    left.legend()
    return figure


def _draw_runs(axes: Axes, run: str, series: Sequence[Points]) -> None:
    """Draw the mean of the runs of one kind, and each run with a thin line."""
    colour = COLOURS[list(RUNS).index(run)]
    for points in filter(None, series):
        axes.plot(*zip(*points, strict=True), color=colour, alpha=0.35, linewidth=0.8)
    if middle := means(series):
        axes.plot(*zip(*middle, strict=True), "o-", color=colour, label=run, ms=3, lw=1.2)


if __name__ == "__main__":
    sys.exit(run_command(main))
