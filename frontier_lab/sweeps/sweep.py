"""Run short trials of a configuration: `frontier-llm sweep key=a,b [key=value ...]`.

    frontier-llm sweep parallel.tensor=1,2 data.micro_batch=1,2          a grid of 4 trials
    frontier-llm sweep hydra/sweeper=optuna 'data.micro_batch=choice(1,2,4)' ...         a search
    frontier-llm sweep sweep=frontier_175b launch.trial_runner=plan      a search of conf/sweep
    frontier-llm sweep hydra/launcher=submitit_slurm hydra.launcher.account=PROJECT ...

`frontier-llm train -m` is the same. Each trial is a run of `frontier-llm train` with few steps and
a time limit (`launch.trial_minutes`). Trials run one after the other on this machine, or each as a
Slurm job. Their overrides `key=value` come from a grid, or from a search for the highest speed or
the lowest validation loss (`launch.trial_value`). A trial that is refused, fails or takes too long
counts as the worst, and the sweep continues.

A file of conf/sweep describes a whole search: the experiment, the sweeper and the axes.
`sweep=NAME` chooses it, and the command line can replace any of its settings. Your own files lie
in DIR/sweep (frontier-llm --conf-dir DIR sweep sweep=NAME).

With `launch.trial_runner=plan` the planner predicts the speed of each trial, without devices. The
same command without this setting measures it.

Each trial writes its result to trial.json in its own folder below `hydra.sweep.dir`. frontier-llm
sweep-report compares the trials. A sweep that is started again in its folder keeps the finished
trials.
"""

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from frontier_lab.jobs.launch import Job
from frontier_lab.option_values import check_writable
from frontier_lab.sweeps.sweep_trials import ONLY_CHANCE, Trial, ranks_by_chance
from frontier_lab.sweeps.trial_runner import (
    derived_overrides,
    finished_trial,
    is_first_task,
    planned_trial,
    repeated_trial,
    run_trial,
)
from frontier_llm.cli.compose import Composed, configured, groups
from frontier_llm.cli.group_files import file_choices, file_values, key_of, overlaid, placed
from frontier_llm.cli.options import MULTIRUN, THE_LINE
from frontier_llm.cli.package_files import CONF
from frontier_llm.config import RunConfig
from frontier_llm.config.decode import leaves
from frontier_llm.config.needed import SWEEP
from frontier_llm.errors import ConfigError, FrontierError, install_command

JOBS_AT_ONCE = 4
"""Default number of trials that run at the same time as Slurm jobs."""
_SILENT_LOGGERS = ("hydra._internal.core_plugins.basic_launcher", "alembic")
"""Loggers whose lines repeat those of the trials, or that a search does not need."""


def main(arguments: Sequence[str]) -> int:
    """Run the trials of a command line; return the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    overrides = [placed(argument) for argument in arguments if argument not in MULTIRUN]
    if {"--cfg", "--cfg=job"} & set(overrides):
        wants = "no --cfg in a sweep, which has a configuration for each trial"
        todo = "use frontier-llm train --cfg job with the settings of one trial"
        raise ConfigError(THE_LINE, "--cfg", wants, todo)
    if not overrides:
        wants = "keys with several values, or a file with a grid or a search"
        todo = "write KEY=VALUE,VALUE, or sweep=NAME; see frontier-llm sweep --help"
        raise ConfigError(THE_LINE, "nothing", wants, todo)
    settings = [*file_settings(overrides), *overrides]
    _check_plugins(settings)
    config = first_configuration(settings)
    _check(config, settings)
    sys.argv = [  # hydra reads its arguments from here
        "frontier-llm sweep",
        "--multirun",
        *plugin_defaults(config, settings),
        *overrides,
    ]
    if "hydra/launcher=submitit_slurm" in settings:
        from frontier_lab.sweeps import slurm_trials  # noqa: F401  (replaces hydra's launcher)
    _silence(settings)
    axes = {key_of(setting) for setting in settings if is_axis(setting)}
    if ranks_by_chance(config.launch.trial_value, axes):
        print(ONLY_CHANCE)

    folders: list[Path] = []

    def task(config: DictConfig) -> float:
        folders.append(Path(HydraConfig.get().runtime.output_dir).absolute())
        return hydra_task(config, axes)

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(task)()
    if not folders:
        return 0  # the trials were Slurm jobs, each of which has printed its result
    sweep = folders[0].parent
    print(f"{sweep}: compare the trials with frontier-llm sweep-report {sweep}")
    return 0 if any(Trial.read(folder).status != "refused" for folder in folders) else 2


def _silence(settings: Sequence[str]) -> None:
    """Silence lines that repeat those of the trials; of optuna only the best trial is printed."""
    for name in _SILENT_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    if "hydra/sweeper=optuna" in settings:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        logging.getLogger("hydra_plugins.hydra_optuna_sweeper._impl").addFilter(_print_best)


def _print_best(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if text.startswith("Best"):
        print(text)
    return False


def file_settings(overrides: Sequence[str]) -> list[str]:
    """Return the search of the chosen file as overrides, such as `parallel.tensor=choice(1,2)`.

    They are its plugins of hydra, with their settings, and its axes. Keys that the command line
    sets are left out. The other keys of the file are not part of the search. Hydra composes the
    file, too, but a mistake in it must be refused before the first trial.

    There are none without `sweep=NAME`, or if no file has this name, which `compose` refuses.
    """
    given = {key_of(override): override.partition("=")[2] for override in overrides}
    name = given.get("sweep")
    if name is None or name not in groups().get("sweep", ()):
        return []
    choices = file_choices("sweep", name)
    plugins = {group: choice for group, choice in choices.items() if group.startswith("hydra/")}
    values = overlaid({"hydra": {"sweeper": {"params": None}}}, file_values("sweep", name))
    axes = values["hydra"]["sweeper"]["params"] or {}
    of_plugins = {
        key: value
        for key, value in leaves(values["hydra"], "hydra.")
        if not key.startswith("hydra.sweeper.params")
    }
    settings = {**plugins, **of_plugins, **axes}
    return [f"{key}={value}" for key, value in settings.items() if key not in given]


def first_configuration(arguments: Sequence[str]) -> RunConfig:
    """Return the configuration with the first value of each axis."""
    overrides = [text for text in arguments if not text.lstrip("+~").startswith("hydra")]
    axes = {key_of(override).partition(".")[0] for override in overrides if is_axis(override)}
    searched = {*axes, *SWEEP.split()}
    values = [_with_first_value(override) for override in overrides]
    return (Composed.of(values) if "experiment" in axes else configured(values, searched)).config


def plugin_defaults(config: RunConfig, arguments: Sequence[str]) -> list[str]:
    """Return settings of the chosen launcher and sweeper, without those that `arguments` give."""
    defaults: dict[str, Any] = {}
    on_slurm = "hydra/launcher=submitit_slurm" in arguments
    if on_slurm:
        job = Job.of(config, 1, (), ())
        defaults = {
            "hydra.launcher.nodes": job.nodes,
            "hydra.launcher.tasks_per_node": job.ranks_per_node,
            "hydra.launcher.cpus_per_task": job.cores_per_rank,
            "hydra.launcher.gpus_per_node": job.devices_per_node,
            "hydra.launcher.array_parallelism": JOBS_AT_ONCE,
        }
    if "hydra/sweeper=optuna" in arguments:
        is_loss = config.launch.trial_value == "loss"
        defaults["hydra.sweeper.direction"] = "minimize" if is_loss else "maximize"
        defaults["hydra.sweeper.n_jobs"] = JOBS_AT_ONCE if on_slurm else 1
    given = set(map(key_of, arguments))
    return [f"{key}={value}" for key, value in defaults.items() if key not in given]


def hydra_task(config: DictConfig, axes: Set[str]) -> float:
    """Run one trial and return its value for a search, as `launch.trial_value` defines it.

    Hydra calls this once per trial. In a Slurm job every task calls it, each for its own rank. A
    search may repeat a setting, which is not tried again. The line of the trial names its `axes`.
    """
    of_hydra = HydraConfig.get()
    overrides = list(of_hydra.overrides.task)
    folder = Path(of_hydra.runtime.output_dir).absolute()
    try:
        trial = finished_trial(overrides, folder) or repeated_trial(overrides, folder)
    except FrontierError as error:  # hydra would print a traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    settings = {str(key): value for key, value in config.launch.items()}
    trial = replace(trial or _result(overrides, folder, settings), goal=settings["trial_value"])
    if is_first_task():
        trial.write(folder)
        total = getattr(of_hydra.sweeper, "n_trials", None)
        number = f"{of_hydra.job.num} of {total}" if total else f"{of_hydra.job.num}"
        value = f"{trial.number:>10} {trial.quantity}"
        shown = [text for text in overrides if key_of(text) in axes] or overrides
        print(f"{number:<10}{trial.status:<14}{value}  {' '.join(shown)}")
        if trial.status == "refused":
            print(f"{'':<10}{trial.outcome}")
    return trial.value


def _result(overrides: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> Trial:
    """Run or predict a trial; `settings` is its section `launch`."""
    if {"plan": True, "train": False}[settings["trial_runner"]]:
        return planned_trial(overrides)
    derived = derived_overrides(overrides, settings)
    trial = run_trial([*overrides, *derived], folder, 60 * float(settings["trial_minutes"]))
    return replace(trial, overrides=list(overrides))


def is_axis(argument: str) -> bool:
    """Return whether an override is an axis: it has several values."""
    override = _parsed(argument)
    return override is not None and override.is_sweep_override()


def _parsed(argument: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None  # compose explains what is wrong with it


def _with_first_value(argument: str) -> str:
    override = _parsed(argument)
    if override is None or not override.is_sweep_override():
        return argument
    value = override.value()
    if isinstance(value, IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    first = next(iter(override.sweep_string_iterator()))
    return f"{override.get_key_element()}={first}"


def _check(config: RunConfig, settings: Sequence[str]) -> None:
    """Refuse what no sweep can do."""
    if config.launch.trial_runner == "plan" and config.launch.trial_value == "loss":
        wants = "speed or speed_per_device: the planner does not predict losses"
        todo = "set launch.trial_value=speed or launch.trial_runner=train"
        raise ConfigError("launch.trial_value", "loss with launch.trial_runner=plan", wants, todo)
    given = {key_of(setting): setting.partition("=")[2] for setting in settings}
    # this folder is in the configuration of hydra, which is composed only for the trials
    check_writable("hydra.sweep.dir", Path(given.get("hydra.sweep.dir", "runs")))
    if "data.global_batch" in given and config.launch.trial_micro_batches is not None:
        wants = "nothing: the global batch follows from launch.trial_micro_batches"
        got = given["data.global_batch"]
        raise ConfigError("data.global_batch", got, wants, "leave out one of the two keys")
    if "run.dir" in given:
        wants = "nothing in a sweep: each trial has a run directory in the folder of the sweep"
        todo = f"set the folder of the sweep instead: hydra.sweep.dir={given['run.dir']}"
        raise ConfigError("run.dir", given["run.dir"], wants, todo)


def _check_plugins(settings: Sequence[str]) -> None:
    """Refuse a launcher or a sweeper whose package is not installed."""
    plugins = {"optuna": "hydra_optuna_sweeper", "submitit": "hydra_submitit_launcher"}
    for key, _, value in (setting.partition("=") for setting in settings):
        name = next((plugin for word, plugin in plugins.items() if word in value), None)
        if name is None or not key.startswith("hydra/"):
            continue
        try:
            import_module(f"hydra_plugins.{name}")
        except ImportError:
            wants = f"the plugin {name.replace('_', '-')}"
            raise ConfigError(key, value, wants, install_command("sweep")) from None
