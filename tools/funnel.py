r"""Choose hyper-parameters on small models for large ones: many short trials, then fewer, longer.

    python tools/funnel.py --stage "model=mt5_tiny trainer.steps=50" 24 \
                           --stage "model=mt5_small trainer.steps=200" 6 \
                           --stage "model=mt5_base trainer.steps=500" 2 \
        data=stdlib_spans 'optimizer.learning_rate=tag(log, interval(1e-4, 3e-2))' \
        'optimizer.warmup_steps=choice(10,40)'

A stage has overrides of its own and a number of trials. In the first, optuna chooses the trials
(`train.py -m hydra/sweeper=optuna`, which needs pip install -e '.[sweep]'); in each later one the
best of the stage before are tried again, as they are. What counts is the validation loss at the end
of a trial, so the last one says what a model of its own size would have chosen. A trial that fails
or takes longer than launch.point_minutes loses. Started again, it goes on: trials in --folder
that are done are not done again. Writes funnel.md there and prints it.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.errors import ConfigError, TrainingError
from tools.options import ending
from tools.point import POINT_FILE, Point
from tools.sweep import ROOT, first_point, is_axis, run_point
from tools.sweep_report import read

REPORT = "funnel.md"


@dataclass(frozen=True)
class Stage:
    """Trials that are compared with each other."""

    overrides: tuple[str, ...]
    """Of all of them: which model, how many steps."""
    trials: int
    folder: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, print the report; return the exit code."""
    options = _parse(arguments)
    stages = [
        Stage(tuple(overrides.split()), int(trials), options.folder / str(number))
        for number, (overrides, trials) in enumerate(options.stage, start=1)
    ]
    text = report(stages, run(stages, options.overrides))
    (options.folder / REPORT).write_text(text)
    print(text)
    return 0


def run(stages: Sequence[Stage], overrides: Sequence[str]) -> list[list[Point]]:
    """Run all stages; return the trials of each, the best first.

    Raises:
        ConfigError: nothing is searched for, or an override is wrong.
        TrainingError: no trial of a stage has come to its end.
    """
    axes = [override for override in overrides if is_axis(override)]
    common = [override for override in overrides if not is_axis(override)]
    if not axes:
        raise ConfigError(
            "--stage", " ".join(overrides), "an axis to search, beside the stages",
            "add one: 'optimizer.learning_rate=tag(log, interval(1e-4, 1e-2))'",
        )  # fmt: skip
    for stage in stages:
        first_point([*common, *stage.overrides, *axes])
    _search(stages[0], [*common, *axes])
    results = [_ranked(stages[0])]
    for stage in stages[1:]:
        for number, settings in enumerate(survivors(results[-1], axes, stage.trials)):
            _try(stage, [*common, *settings], stage.folder / str(number))
        results.append(_ranked(stage))
    return results


def survivors(ranked: Sequence[Point], axes: Sequence[str], count: int) -> list[list[str]]:
    """Return the settings of the best trials, each once.

    Args:
        ranked: trials, the best first.
        axes: the overrides that were searched.
        count: how many settings, at most.
    """
    settings = (settings_of(point, axes) for point in ranked if point.status == "done")
    return [list(one) for one in dict.fromkeys(settings)][:count]


def settings_of(point: Point, axes: Sequence[str]) -> tuple[str, ...]:
    """Return what a trial has set along the axes."""
    keys = {_key(axis) for axis in axes}
    return tuple(sorted(override for override in point.overrides if _key(override) in keys))


def report(stages: Sequence[Stage], results: Sequence[Sequence[Point]]) -> str:
    """Write the stages as Markdown, the last one first: it decides."""
    lines = ["# Funnel", ""]
    varied = _varied(results[0])
    for stage, ranked in reversed(list(zip(stages, results, strict=True))):
        lines += [f"## {' '.join(stage.overrides)}: {len(ranked)} trials", ""]
        lines += ["| validation loss | " + " | ".join(varied) + " | came to |"]
        lines += ["|" + "---|" * (len(varied) + 2)]
        for point in ranked:
            values = {_key(o): o.partition("=")[2] for o in point.overrides}
            loss = "-" if point.validation_loss is None else f"{point.validation_loss:.4f}"
            cells = [loss, *(values[key] for key in varied), point.status]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stage", nargs=2, action="append", required=True, metavar=("OVERRIDES", "TRIALS"),
        help="what its trials have in common, and how many there are; once for each stage",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/funnel"), help="of the trials (%(default)s)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all trials")
    options = parser.parse_intermixed_args(arguments)
    for _, trials in options.stage:
        if not trials.isdigit() or int(trials) < 1:
            parser.error(f"--stage OVERRIDES TRIALS: {trials!r} is no number of trials")
    return options


def _search(stage: Stage, overrides: Sequence[str]) -> None:
    """Let optuna choose the trials that are not done yet, in a folder of their own."""
    done = len(list(stage.folder.rglob(POINT_FILE)))
    if done >= stage.trials:
        return
    folder = stage.folder.absolute() / f"from_{done}"
    command = [
        sys.executable, "train.py", "-m", "hydra/sweeper=optuna",
        f"hydra.sweeper.n_trials={stage.trials - done}", "launch.point_value=loss",
        f"hydra.sweep.dir={folder}", *stage.overrides, *overrides,
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, check=False)
    if ended.returncode:
        raise TrainingError(f"the search ended with exit code {ended.returncode}; see above")


def _try(stage: Stage, settings: Sequence[str], folder: Path) -> None:
    if (folder / POINT_FILE).exists():
        return
    overrides = [*stage.overrides, *settings]
    minutes = first_point(overrides).launch.point_minutes
    folder.mkdir(parents=True, exist_ok=True)
    point = run_point(overrides, folder.absolute(), 60 * minutes)
    point.write(folder)
    print(f"{point.status:<14}loss {point.validation_loss}  {' '.join(overrides)}", flush=True)


def _ranked(stage: Stage) -> list[Point]:
    """Return a stage's trials, the best first.

    Raises:
        TrainingError: none is done.
    """
    points = sorted(read(stage.folder), key=_loss)
    if not points or points[0].validation_loss is None:
        reasons = points[0].reason if points else "there is none"
        raise TrainingError(
            f"no trial of {' '.join(stage.overrides)} has come to its end: {reasons}\n"
            f"  do: see {stage.folder}, and delete it to try again"
        )
    return points


def _loss(point: Point) -> float:
    return math.inf if point.validation_loss is None else point.validation_loss


def _varied(points: Sequence[Point]) -> list[str]:
    """Return the keys in which trials differ."""
    values: dict[str, set[str]] = {}
    for point in points:
        for override in point.overrides:
            values.setdefault(_key(override), set()).add(override)
    return [key for key, found in values.items() if len(found) > 1]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


if __name__ == "__main__":
    sys.exit(ending(main))
