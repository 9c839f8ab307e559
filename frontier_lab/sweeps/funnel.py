r"""Find hyper-parameters of a large model with trials of small models.

    frontier-llm funnel --stage "model=mt5_tiny trainer.steps=50" 24 \
                        --stage "model=mt5_small trainer.steps=200" 6 \
                        --stage "model=mt5_base trainer.steps=500" 2 \
        data=stdlib_spans 'optimizer.learning_rate=tag(log, interval(1e-4, 3e-2))' \
        'optimizer.warmup_steps=choice(10,40)'

A funnel is a sequence of stages: many short trials first, fewer and longer ones later. `--stage
OVERRIDES TRIALS` gives the overrides `key=value` of all trials of a stage, and their number. In the
first stage the library optuna chooses values for the axes, which are the overrides with several
possible values (it needs the extra `sweep` of this package). Each later stage repeats the best
settings of the preceding stage, usually on a larger model. Trials are compared by the validation
loss at their end, so the last stage shows which settings suit a model of its size. A trial that
fails or takes longer than launch.trial_minutes counts as the worst. The same command continues an
interrupted funnel, because finished trials in --folder are kept. Writes the report funnel.md to
--folder and prints it.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_lab.option_values import check_writable, write_text
from frontier_lab.sweeps.sweep import first_configuration, is_axis
from frontier_lab.sweeps.sweep_trials import TRIAL_FILE, Trial, markdown_table, read
from frontier_lab.sweeps.sweep_trials import axes as axes_of
from frontier_lab.sweeps.trial_runner import run_trial
from frontier_llm.cli.group_files import key_of, placed
from frontier_llm.cli.options import path, tool_parser
from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.units import counted

REPORT = "funnel.md"
_OWN = {
    "hydra.sweep.dir": "use --folder", "run.dir": "use --folder", "hydra/sweeper": "leave it out",
    "hydra.sweeper.n_trials": "use --stage OVERRIDES TRIALS", "launch.trial_value": "leave it out",
}  # fmt: skip
"""Keys that a funnel sets for its trials, and what a user writes instead."""


@dataclass(frozen=True)
class Stage:
    """One stage of a funnel: trials that are compared with each other."""

    overrides: tuple[str, ...]
    """Overrides of all trials of the stage, such as the model and the number of steps."""
    trials: int
    folder: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and print the report; return the exit code."""
    options = _parse(arguments)
    check_writable("--folder", options.folder)
    stages = [
        Stage(tuple(map(placed, overrides.split())), int(trials), options.folder / str(number))
        for number, (overrides, trials) in enumerate(options.stage, start=1)
    ]
    text = report(stages, run(stages, list(map(placed, options.overrides))))
    write_text(options.folder / REPORT, text, "--folder")
    print(text)
    return 0


def run(stages: Sequence[Stage], overrides: Sequence[str]) -> list[list[Trial]]:
    """Run all stages; return the trials of each stage, the best first."""
    axes = [override for override in overrides if is_axis(override)]
    common = [override for override in overrides if not is_axis(override)]
    if not axes:
        wants = "an axis to search, in addition to the stages"
        todo = "add one: 'optimizer.learning_rate=tag(log, interval(1e-4, 1e-2))'"
        raise ConfigError("--stage", " ".join(overrides), wants, todo)
    for stage in stages:
        first_configuration([*common, *stage.overrides, *axes])
    _search(stages[0], [*common, *axes])
    results = [_ranked(stages[0])]
    for stage in stages[1:]:
        for number, settings in enumerate(best_settings(results[-1], axes, stage.trials)):
            _run_unless_done(stage, [*common, *settings], stage.folder / str(number))
        results.append(_ranked(stage))
    return results


def best_settings(ranked: Sequence[Trial], axes: Sequence[str], count: int) -> list[list[str]]:
    """Return the settings of the best trials without repetitions."""
    found = (settings_of(trial, axes) for trial in ranked if trial.status == "done")
    return [list(settings) for settings in dict.fromkeys(found)][:count]


def settings_of(trial: Trial, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a trial that give values to the axes."""
    keys = {key_of(axis) for axis in axes}
    return tuple(sorted(override for override in trial.overrides if key_of(override) in keys))


def report(stages: Sequence[Stage], results: Sequence[Sequence[Trial]]) -> str:
    """Return the report in Markdown. The last stage comes first, because it decides."""
    lines = ["# Funnel", ""]
    keys = dict.fromkeys(key_of(text) for trial in results[0] for text in trial.overrides)
    varied = [key for key in keys if key in axes_of(results[0])]
    for stage, ranked in reversed(list(zip(stages, results, strict=True))):
        rows = []
        for trial in ranked:
            values = {key_of(text): text.partition("=")[2] for text in trial.overrides}
            loss = "-" if trial.validation_loss is None else f"{trial.validation_loss:.4f}"
            rows.append([loss, *(values[key] for key in varied), trial.status])
        lines += [f"## {' '.join(stage.overrides)}: {counted(len(ranked), 'trial')}", ""]
        lines += [*markdown_table(["validation loss", *varied, "result"], rows), ""]
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--stage", nargs=2, action="append", required=True, metavar=("OVERRIDES", "TRIALS"),
        help="overrides of all trials of a stage, and their number; once per stage",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=path, default=Path("runs/funnel"),
        help="folder of the trials and the report (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of all stages, and the axes"
    )
    options = parser.parse_intermixed_args(arguments)
    for _, trials in options.stage:
        if not trials.isdigit() or int(trials) < 1:
            parser.error(f"--stage OVERRIDES TRIALS: {trials!r} is not a number of trials")
    of_stages = [word for overrides, _ in options.stage for word in overrides.split()]
    for word in (*of_stages, *options.overrides):
        if (key := key_of(word)) in _OWN:
            got = word.partition("=")[2]
            raise ConfigError(key, got, "nothing: a funnel sets this key for its trials", _OWN[key])
    return options


def _search(stage: Stage, overrides: Sequence[str]) -> None:
    """Let optuna choose and run the remaining trials of a stage, in a new folder."""
    finished = len(list(stage.folder.rglob(TRIAL_FILE)))
    if finished >= stage.trials:
        return
    folder = stage.folder.absolute() / f"from_{finished}"
    command = [
        sys.executable, "-m", "frontier_llm", "sweep", "hydra/sweeper=optuna",
        f"hydra.sweeper.n_trials={stage.trials - finished}", "launch.trial_value=loss",
        f"hydra.sweep.dir={folder}", *stage.overrides, *overrides,
    ]  # fmt: skip
    search = subprocess.run(command, check=False)
    if search.returncode:
        raise TrainingError(
            f"the search ended with exit code {search.returncode}: see its message above"
        )


def _run_unless_done(stage: Stage, settings: Sequence[str], folder: Path) -> None:
    """Run one trial of a later stage in a folder, unless the folder has its result already."""
    if (folder / TRIAL_FILE).exists():
        return
    overrides = [*stage.overrides, *settings]
    minutes = first_configuration(overrides).launch.trial_minutes
    folder.mkdir(parents=True, exist_ok=True)
    trial = run_trial(overrides, folder.absolute(), 60 * minutes)
    trial.write(folder)
    print(f"{trial.status:<14}loss {trial.validation_loss}  {' '.join(overrides)}", flush=True)


def _ranked(stage: Stage) -> list[Trial]:
    """Return the trials of a stage, the best first."""
    trials = sorted(read(stage.folder), key=_loss)
    if not trials or trials[0].validation_loss is None:
        reason = trials[0].reason if trials else "there is no trial"
        raise TrainingError(
            f"no trial of {' '.join(stage.overrides)} has finished: {reason}\n"
            f"  do: see {stage.folder}, and delete it to try again"
        )
    return trials


def _loss(trial: Trial) -> float:
    return math.inf if trial.validation_loss is None else trial.validation_loss
