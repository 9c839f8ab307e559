"""Compare what a model learns with quantised collectives and without: curves, a table, a picture.

    python tools/convergence.py                      # trains what is missing, draws, prints
    python tools/convergence.py --draw-only          # draws what there is
    python tools/convergence.py --minutes 20         # then stops in order (exit code 3); call again

Trains gpt_tiny on the default corpus once with each preset of `collectives=`: same seed, same
samples, four ranks as two nodes, sharding=zeropp, fp32. The runs take turns of --slice steps. Each
has a folder under --folder and goes on from its newest checkpoint, also when the tool is called
again. Writes the picture and a JSON file beside it with every validation loss.
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

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib
from matplotlib.figure import Figure

from frontier_llm.telemetry.history import History
from tools.options import at_least, ending, positive

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "convergence.svg"
PICTURE_FORMATS = (".svg", ".png", ".pdf")
PRESETS = ("plain", "zeropp", "zeropp_feedback")
COLOURS = {"plain": "#475569", "zeropp": "#d97706", "zeropp_feedback": "#2563eb"}
LAYOUT = (
    "parallel.pipeline=1",
    "sharding=zeropp",
    "precision=fp32",
    "launch.ranks=4",
    "launch.ranks_per_node=2",
    "telemetry.wandb=off",
    "telemetry.progress=false",
    "trainer.sample_tokens=0",
)
STOPPED = 3
"""Exit code of a run that was asked to stop and saved its state."""


@dataclass(frozen=True)
class Curve:
    """What one preset's run has shown so far."""

    preset: str
    steps: int
    """Done."""
    training: list[tuple[int, float]]
    """Step, loss in nats a token."""
    validation: list[tuple[int, float]]

    @classmethod
    def read(cls, preset: str, folder: Path) -> "Curve":
        """Read a run's metrics, as far as there are any."""
        history = History.read(folder)
        done = max(history.steps, default=0)
        return cls(preset, done, history.points("loss"), history.points("validation_loss"))

    @property
    def final(self) -> float:
        """The last validation loss."""
        return self.validation[-1][1] if self.validation else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, draw and print; return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run must not outlive this
    code = 0 if options.draw_only else train_all(options)
    if code not in (0, STOPPED):
        return code
    curves = [Curve.read(preset, options.folder / preset) for preset in options.presets]
    begun = [curve for curve in curves if curve.steps]
    if begun:
        draw(begun, options.picture)
        write_json(begun, options)
        for line in table(begun):
            print(line)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    count = at_least(1)
    add("--steps", type=count, default=1000, help="of each run (default 1000)")
    add("--slice", type=count, default=250, help="steps until the next preset's turn (default 250)")
    add("--every", type=count, default=50, help="steps from a validation to the next (default 50)")
    add("--presets", nargs="+", default=list(PRESETS), choices=PRESETS, help="(default: all)")
    add("--folder", type=Path, default=ROOT / "runs" / "convergence", help="of the runs")
    add("--picture", type=picture, default=PICTURE, help="where to draw; JSON goes beside it")
    add("--minutes", type=positive, default=math.inf, help="then stop, to go on another time")
    add("--draw-only", action="store_true", help="train nothing")
    add("overrides", nargs="*", metavar="key=value", help="more of train.py's, for all runs")
    return parser.parse_intermixed_args(arguments)


def picture(text: str) -> Path:
    """Type of an option: a file of a format that can be drawn."""
    path = Path(text)
    if path.suffix not in PICTURE_FORMATS:
        raise argparse.ArgumentTypeError(f"{path} ends in none of {', '.join(PICTURE_FORMATS)}")
    return path


def command(preset: str, goal: int, options: argparse.Namespace) -> list[str]:
    """Return the command that brings a preset's run to a step."""
    return [
        sys.executable,
        str(ROOT / "train.py"),
        *LAYOUT,
        f"collectives={preset}",
        f"trainer.steps={goal}",
        f"optimizer.decay_steps={options.steps}",
        f"trainer.evaluate_every_steps={options.every}",
        f"run.dir={options.folder / preset}",
        *options.overrides,
    ]


def train_all(options: argparse.Namespace) -> int:
    """Train in turns; return the exit code, `STOPPED` when asked to end before all is done."""
    deadline = time.monotonic() + 60 * options.minutes
    goals = [*range(options.slice, options.steps, options.slice), options.steps]
    try:
        for goal, preset in product(goals, options.presets):
            if code := train(preset, goal, options, deadline):
                return code
    except KeyboardInterrupt:
        return STOPPED
    return 0


def train(preset: str, goal: int, options: argparse.Namespace, deadline: float) -> int:
    """Bring one run to a step, or stop it in order at the deadline."""
    done = Curve.read(preset, options.folder / preset).steps
    left = deadline - time.monotonic()
    if done >= goal:
        return 0
    if left <= 0:
        return STOPPED
    _clear_unsaved(options.folder / preset)
    print(f"{preset}: step {done}, on to {goal} of {options.steps}", flush=True)
    process = subprocess.Popen(command(preset, goal, options), cwd=ROOT)
    try:
        return process.wait(None if math.isinf(left) else left)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        if isinstance(reason, KeyboardInterrupt):
            raise
        return code


def _clear_unsaved(folder: Path) -> None:
    """Remove a run that was killed before its first checkpoint: train.py cannot go on with it."""
    if (folder / "config.yaml").exists() and not any((folder / "checkpoints").glob("step_*[0-9]")):
        shutil.rmtree(folder)


def table(curves: Sequence[Curve]) -> list[str]:
    """Return the table of last validation losses, as Markdown."""
    lines = ["| collectives | steps | validation loss | of plain |", "|---|---|---|---|"]
    for curve in curves:
        _, difference = (differences(curve, curves) or [(0, math.nan)])[-1]
        lines.append(
            f"| `{curve.preset}` | {curve.steps} | {curve.final:.4f} | {difference:+.2f}% |"
        )
    return lines


def differences(curve: Curve, curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """Compare validation losses with plain's: (step, percent), at the steps that both have."""
    plain = dict(next((c.validation for c in curves if c.preset == "plain"), []))
    return [(s, 100 * (loss / plain[s] - 1)) for s, loss in curve.validation if s in plain]


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def write_json(curves: Sequence[Curve], options: argparse.Namespace) -> None:
    """Write all validation losses, and what was run."""
    words = [
        w for w in command("PRESET", options.steps, options)[2:] if not w.startswith("run.dir=")
    ]
    facts = {
        "command": " ".join(["train.py", *words]),
        "curves": {
            curve.preset: {"steps": curve.steps, "validation": curve.validation} for curve in curves
        },
    }
    options.picture.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw losses, and beside them how far each validation loss is from plain's."""
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
             "axes.grid": True, "grid.color": "#e2e8f0", "svg.hashsalt": "convergence",
             "legend.frameon": False}  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for curve in curves:
            colour = COLOURS[curve.preset]
            left.plot(*_columns(curve.validation), "o-", color=colour, label=curve.preset, ms=3)
            left.plot(*_columns(curve.training), color=colour, alpha=0.35, linewidth=0.8)
            if curve.preset != "plain":
                right.plot(*_columns(differences(curve, curves)), "o-", color=colour, ms=3, lw=1.2)
        for bound in (1.0, 0.3):
            right.axhline(bound, color="#94a3b8", linewidth=0.8, linestyle="--")
            right.axhline(-bound, color="#94a3b8", linewidth=0.8, linestyle="--")
        left.set(title="Validation loss (faint: training)", xlabel="step", ylabel="nats a token")
        right.set(title="Difference from plain", xlabel="step", ylabel="percent")
        left.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=path.suffix[1:], metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(ending(main))
