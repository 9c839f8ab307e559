"""Compare the convergence of training with and without quantised collectives.

    python -m benchmarks.convergence                  # train what is missing, draw, print
    python -m benchmarks.convergence --draw-only      # draw and print the runs that exist
    python -m benchmarks.convergence --minutes 20     # stop after 20 minutes, with exit code 3

Trains gpt_tiny on the default corpus with several presets of `collectives=`, the formats in which
states are sent, and with several seeds. Each run has four ranks on two simulated nodes, with
sharding=zeropp in fp32. Runs with the same seed have the same initial weights and samples, and take
turns of --slice steps. Each run has a folder under --folder and resumes from its newest checkpoint,
also when this program is called again.

Any change of the arithmetic makes two runs diverge. The run `perturbed` shows by how much: it is
the run `plain` with initial weights that are 1% larger. A preset has an effect only if it differs
more from `plain` than `perturbed` does. All validation losses are written to --json, and the curves
are drawn to --picture.
"""

import argparse
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import ROOT, add_numbers
from frontier_llm.cli.options import new_file, positive, run_command, tool_parser, written
from frontier_llm.errors import StopRequested
from frontier_llm.telemetry.history import History

PICTURE = ROOT / "docs" / "images" / "convergence.svg"
RESULTS = ROOT / "benchmarks" / "results" / "convergence.json"
PICTURE_FORMATS = (".svg", ".png", ".pdf")
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


@dataclass(frozen=True)
class Curve:
    """Validation losses of one run so far."""

    kind: str
    """A key of RUNS."""
    seed: int
    steps: int
    """Number of completed steps."""
    validation: list[tuple[int, float]]
    """Pairs of step and loss in nats per token."""

    @classmethod
    def read(cls, kind: str, seed: int, folder: Path) -> "Curve":
        """Read the metrics of a run; the folder may be absent."""
        history = History.read(folder)
        last_step = max(history.steps, default=0)
        return cls(kind, seed, last_step, history.points("validation_loss"))

    @property
    def final(self) -> float:
        """The last validation loss; NaN if there is none."""
        return self.validation[-1][1] if self.validation else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, draw the curves, write and print losses; return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the run is stopped too
    exit_code = 0 if options.draw_only else train_all(options)
    if exit_code not in (0, StopRequested.exit_code):
        return exit_code
    runs = product(options.runs, seeds_of(options))
    curves = [Curve.read(*run, run_folder(*run, options)) for run in runs]
    started = [curve for curve in curves if curve.steps]
    if started:
        draw(started, options.picture)
        write_json(started, options)
        for line in table(started):
            print(line)
    return exit_code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = tool_parser(__doc__)
    add = parser.add_argument
    add_numbers(
        parser,
        [
            ("steps", 1, 1000, "steps per run"),
            ("slice", 1, 250, "steps per turn"),
            ("every", 1, 50, "steps between two validations"),
            ("seeds", 1, 2, "runs per kind, with seeds from 1 on"),
        ],
    )
    add("--folder", type=Path, default=ROOT / "runs" / "convergence", help="folder of the runs")
    add("--picture", type=picture, default=PICTURE, help="file for the curves (%(default)s)")
    add("--json", type=new_file, default=RESULTS, help="file for the losses (%(default)s)")
    add("--minutes", type=positive, default=math.inf, help="time limit; a later call resumes")
    add("--draw-only", action="store_true", help="train nothing")
    add("--runs", nargs="+", choices=RUNS, default=list(BY_DEFAULT),
        help=f"kinds of runs (default {' '.join(BY_DEFAULT)})")  # fmt: skip
    add("overrides", nargs="*", metavar="key=value", help="overrides for all runs")
    return parser.parse_intermixed_args(arguments)


def picture(text: str) -> Path:
    """Parse the value of an option: a picture file of a supported format."""
    path = Path(text)
    if path.suffix not in PICTURE_FORMATS:
        raise argparse.ArgumentTypeError(f"{path} does not end in {', '.join(PICTURE_FORMATS)}")
    return path


def seeds_of(options: argparse.Namespace) -> range:
    """Return the seeds of every kind of run."""
    return range(1, options.seeds + 1)


def run_folder(kind: str, seed: int, options: argparse.Namespace) -> Path:
    """Return the folder of a run."""
    folder: Path = options.folder
    return folder / kind / f"seed_{seed}"


def command(kind: str, seed: int, goal: int, options: argparse.Namespace) -> list[str]:
    """Return the command that trains a run up to step `goal`."""
    return [
        sys.executable,
        str(ROOT / "train.py"),
        *COMMON_OVERRIDES,
        *RUNS[kind],
        f"trainer.seed={seed}",
        f"trainer.steps={goal}",
        f"optimizer.decay_steps={options.steps}",
        f"trainer.evaluate_every_steps={options.every}",
        f"run.dir={run_folder(kind, seed, options)}",
        *options.overrides,
    ]


def train_all(options: argparse.Namespace) -> int:
    """Train in turns; return 0, or the exit code of `StopRequested` after the time limit."""
    deadline = time.monotonic() + 60 * options.minutes
    goals = [*range(options.slice, options.steps, options.slice), options.steps]
    try:
        for seed, goal, kind in product(seeds_of(options), goals, options.runs):
            if exit_code := train(kind, seed, goal, options, deadline):
                return exit_code
    except KeyboardInterrupt:
        return StopRequested.exit_code
    return 0


def train(kind: str, seed: int, goal: int, options: argparse.Namespace, deadline: float) -> int:
    """Train one run up to step `goal`; return its exit code.

    At the deadline, a value of time.monotonic(), the run is asked to save and stop.
    """
    folder = run_folder(kind, seed, options)
    completed = Curve.read(kind, seed, folder).steps
    seconds_left = deadline - time.monotonic()
    if completed >= goal:
        return 0
    if seconds_left <= 0:
        return StopRequested.exit_code
    _clear_unsaved(folder)
    print(f"{kind}, seed {seed}: steps {completed + 1} to {goal} of {options.steps}", flush=True)
    process = subprocess.Popen(command(kind, seed, goal, options), cwd=ROOT)
    try:
        return process.wait(None if math.isinf(seconds_left) else seconds_left)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        process.send_signal(signal.SIGTERM)
        exit_code = process.wait()
        if isinstance(reason, KeyboardInterrupt):
            raise
        return exit_code


def _clear_unsaved(folder: Path) -> None:
    """Remove a run that was killed before its first checkpoint: it cannot be resumed."""
    if (folder / "config.yaml").exists() and not any((folder / "checkpoints").glob("step_*[0-9]")):
        shutil.rmtree(folder)


def table(curves: Sequence[Curve]) -> list[str]:
    """Return the lines of a Markdown table with the last validation losses.

    The last column is the mean difference over all validations and seeds.
    """
    lines = [
        "| run | steps | validation loss | difference from plain | standard error | by seed "
        "| all validations |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(curve.kind for curve in curves):
        of_kind = [curve for curve in curves if curve.kind == kind]
        steps, loss = min(curve.steps for curve in of_kind), fmean(curve.final for curve in of_kind)
        series = [points for curve in of_kind if (points := differences(curve, curves))]
        percents = [points[-1][1] for points in series]
        everywhere = [percent for points in series for _, percent in points]
        mean = f"{fmean(percents):+.2f}%" if percents else ""
        error = f"{stdev(percents) / math.sqrt(len(percents)):.2f}%" if len(percents) > 1 else ""
        overall = f"{fmean(everywhere):+.3f}%" if everywhere else ""
        by_seed = ", ".join(f"{percent:+.2f}%" for percent in percents)
        lines.append(
            f"| `{kind}` | {steps} | {loss:.4f} | {mean} | {error} | {by_seed} | {overall} |"
        )
    return lines


def differences(curve: Curve, curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """Return the difference in percent from the plain run of the same seed, at common steps."""
    is_plain = (c.validation for c in curves if c.kind == "plain" and c.seed == curve.seed)
    plain = dict(next(is_plain, []))
    return [
        (step, 100 * (loss / plain[step] - 1)) for step, loss in curve.validation if step in plain
    ]


def means(series: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return the mean of several curves at their common steps."""
    shared = set.intersection(*(set(dict(points)) for points in series)) if series else set()
    return [(step, fmean(dict(points)[step] for points in series)) for step in sorted(shared)]


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a curve."""
    return [step for step, _ in points], [value for _, value in points]


def write_json(curves: Sequence[Curve], options: argparse.Namespace) -> None:
    """Write all validation losses and the command of the runs."""
    differs_by_run = ("run.dir=", "trainer.seed=", *RUNS["plain"])
    overrides = command("plain", 0, options.steps, options)[2:]
    common = [override for override in overrides if not override.startswith(differs_by_run)]
    facts = {
        "command": " ".join(["train.py", *common]),
        "of each run": {kind: " ".join(RUNS[kind]) for kind in options.runs},
        "curves": [
            {"run": c.kind, "seed": c.seed, "steps": c.steps, "validation": c.validation}
            for c in curves
        ],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with written(options.json, "--json"):
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the validation losses, and their differences from the run `plain`."""
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
             "axes.grid": True, "grid.color": "#e2e8f0", "svg.hashsalt": "convergence",
             "legend.frameon": False}  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for kind in dict.fromkeys(curve.kind for curve in curves):
            of_kind = [curve for curve in curves if curve.kind == kind]
            _draw_runs(left, kind, [curve.validation for curve in of_kind])
            if kind != "plain":
                _draw_runs(right, kind, [differences(curve, curves) for curve in of_kind])
        for bound in (1.0, 0.3):  # percent, to compare the curves with
            right.axhline(bound, color="#94a3b8", linewidth=0.8, linestyle="--")
            right.axhline(-bound, color="#94a3b8", linewidth=0.8, linestyle="--")
        left.set(title="Validation loss", xlabel="step", ylabel="nats per token")
        right.set(title="Difference from plain of the same seed", xlabel="step", ylabel="percent")
        left.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=path.suffix[1:], metadata={"Date": None})


def _draw_runs(axes: Axes, kind: str, series: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Draw the mean of the runs of one kind, and each run with a thin line."""
    colour = COLOURS[list(RUNS).index(kind)]
    for points in series:
        axes.plot(*_columns(points), color=colour, alpha=0.35, linewidth=0.8)
    axes.plot(*_columns(means(series)), "o-", color=colour, label=kind, ms=3, lw=1.2)


if __name__ == "__main__":
    sys.exit(run_command(main))
