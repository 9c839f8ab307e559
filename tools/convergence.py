"""Compare what a model learns with quantised collectives and without: curves, a table, a picture.

    python tools/convergence.py                      # trains what is missing, draws, prints
    python tools/convergence.py --draw-only          # draws what there is
    python tools/convergence.py --minutes 20         # stops in order after 20 minutes; call again

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

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "convergence.svg"
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
        file = folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = {row["step"]: row for row in map(json.loads, lines)}
        losses = [(step, row["loss"]) for step, row in sorted(rows.items())]
        checked = [
            (step, row["validation_loss"])
            for step, row in sorted(rows.items())
            if row["validation_loss"] is not None
        ]
        return cls(preset, max(rows, default=0), losses, checked)

    @property
    def final(self) -> float:
        """The last validation loss."""
        return self.validation[-1][1] if self.validation else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, draw and print; return the exit code."""
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    if not options.draw_only:
        goals = [*range(options.slice, options.steps, options.slice), options.steps]
        for goal, preset in product(goals, options.presets):
            code = train(preset, goal, options, deadline)
            if code not in (0, STOPPED):
                return code
    curves = [Curve.read(preset, options.folder / preset) for preset in options.presets]
    begun = [curve for curve in curves if curve.steps]
    if begun:
        draw(begun, options.picture)
        write_json(begun, options)
        for line in table(begun):
            print(line)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="of each run (default 1000)")
    add("--slice", type=int, default=250, help="steps until the next preset's turn (default 250)")
    add("--every", type=int, default=50, help="steps from one validation to the next (default 50)")
    add("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    add("--folder", type=Path, default=ROOT / "runs" / "convergence", help="of the runs")
    add("--picture", type=Path, default=PICTURE, help="where to draw; JSON goes beside it")
    add("--minutes", type=float, default=math.inf, help="then stop, to go on another time")
    add("--draw-only", action="store_true", help="train nothing")
    add("overrides", nargs="*", metavar="key=value", help="more of train.py's, for all runs")
    return parser.parse_intermixed_args(arguments)


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


def train(preset: str, goal: int, options: argparse.Namespace, deadline: float) -> int:
    """Bring one run to a step, or stop it in order at the deadline."""
    done = Curve.read(preset, options.folder / preset).steps
    left = deadline - time.monotonic()
    if done >= goal or left <= 0:
        return 0
    _clear_unsaved(options.folder / preset)
    print(f"{preset}: step {done}, on to {goal} of {options.steps}", flush=True)
    process = subprocess.Popen(command(preset, goal, options), cwd=ROOT)
    try:
        return process.wait(None if math.isinf(left) else left)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGTERM)
        return process.wait()


def _clear_unsaved(folder: Path) -> None:
    """Remove a run that was killed before its first checkpoint: train.py cannot go on with it."""
    if folder.exists() and not any((folder / "checkpoints").glob("step_*[0-9]")):
        shutil.rmtree(folder)


def table(curves: Sequence[Curve]) -> list[str]:
    """Return the table of last validation losses, as Markdown."""
    lines = ["| collectives | steps | validation loss | of plain |", "|---|---|---|---|"]
    for curve in curves:
        lines.append(
            f"| `{curve.preset}` | {curve.steps} | {curve.final:.4f} | "
            f"{_difference(curve, curves):+.2%} |"
        )
    return lines


def _difference(curve: Curve, curves: Sequence[Curve]) -> float:
    """Compare with plain, at the last step that both have."""
    plain = dict(next((c.validation for c in curves if c.preset == "plain"), []))
    common = [(step, loss) for step, loss in curve.validation if step in plain]
    if not common:
        return math.nan
    step, loss = common[-1]
    return loss / plain[step] - 1


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
            x, y = zip(*curve.validation, strict=True) if curve.validation else ((), ())
            left.plot(x, y, "o-", color=COLOURS[curve.preset], label=curve.preset, markersize=3)
            steps, losses = zip(*curve.training, strict=True)
            left.plot(steps, losses, color=COLOURS[curve.preset], alpha=0.35, linewidth=0.8)
        plain = dict(curves[0].validation)
        for curve in curves[1:]:
            points = [(s, 100 * (v / plain[s] - 1)) for s, v in curve.validation if s in plain]
            x, y = zip(*points, strict=True) if points else ((), ())
            right.plot(x, y, "o-", color=COLOURS[curve.preset], markersize=3, linewidth=1.2)
        for bound in (1.0, 0.3):
            right.axhline(bound, color="#94a3b8", linewidth=0.8, linestyle="--")
            right.axhline(-bound, color="#94a3b8", linewidth=0.8, linestyle="--")
        left.set(title="Validation loss (faint: training)", xlabel="step", ylabel="nats a token")
        right.set(title="Difference from plain", xlabel="step", ylabel="percent")
        left.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=path.suffix[1:], metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
