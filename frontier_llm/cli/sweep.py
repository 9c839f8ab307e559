"""Run short trials of a configuration: `frontier-llm sweep key=a,b [key=value ...]`.

    frontier-llm sweep parallel.tensor=1,2 data.micro_batch=1,2          a grid of 4 trials
    frontier-llm sweep hydra/sweeper=optuna 'data.micro_batch=choice(1,2,4)' ...         a search
    frontier-llm sweep hydra/launcher=submitit_slurm hydra.launcher.account=PROJECT ...

`frontier-llm train -m` is the same. Each trial is a run of `frontier-llm train` with few steps and
a time limit (`launch.trial_minutes`). Trials run one after the other on this machine, or each as a
Slurm job. Their overrides `key=value` come from a grid, or from a search for the highest speed or
the lowest validation loss (`launch.trial_value`). A trial that is refused, fails or takes too long
counts as the worst, and the sweep continues.

With `launch.trial_runner=plan` the planner predicts the speed of each trial, without devices. The
same command without this setting measures it.

Each trial writes its result to trial.json in its own folder below `hydra.sweep.dir`. frontier-llm
sweep-report compares the trials. A sweep that is started again in its folder keeps the finished
trials.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from frontier_llm.cli.compose import compose, current_names
from frontier_llm.cli.launch import Job
from frontier_llm.cli.package_files import CONF
from frontier_llm.cli.trial import TRIAL_FILE, Status, Trial
from frontier_llm.config import RunConfig, decode
from frontier_llm.config.renamed import current_override, with_current_names
from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import estimate
from frontier_llm.telemetry.history import History

MULTIRUN = ("-m", "--multirun")
TRIAL_DEFAULTS = {
    "trainer.steps": "12",
    "trainer.evaluate_every_steps": "null",
    "trainer.sample_tokens": "0",
    "checkpoint": "off",
    "telemetry.wandb": "off",
    "telemetry.progress": "false",
}
"""Settings of a trial unless the command line gives others: a trial only measures."""
WARM_UP_STEPS = 2
"""Number of first steps that do not count for a trial's speed."""
WORST_LOSS = 1e9
"""The loss that a search receives for a trial that is not done."""
JOBS_AT_ONCE = 4
"""Default number of trials that run at the same time as Slurm jobs."""
_TERMINATION_SECONDS = 30.0
"""Time between SIGTERM and SIGKILL for a trial that takes too long."""
_OUT_OF_MEMORY = ("out of memory", "SIGKILL")
"""Words in the output of a trial that ran out of memory. The kernel then kills with SIGKILL."""


def main(arguments: Sequence[str]) -> int:
    """Run the trials of a command line; return the exit code.

    Raises:
        ConfigError: a key does not exist, a value has the wrong type, or a plugin is absent.
    """
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    overrides = [current_names(argument) for argument in arguments if argument not in MULTIRUN]
    _check_plugins(overrides)
    config = first_configuration(overrides)
    _check_value(config)
    sys.argv = [  # hydra reads its arguments from here
        "frontier-llm sweep",
        "--multirun",
        *plugin_defaults(config, overrides),
        *overrides,
    ]
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(hydra_task)()
    return 0


def first_configuration(arguments: Sequence[str]) -> RunConfig:
    """Return the configuration with the first value of each axis (an override with several values).

    Raises:
        ConfigError: something is wrong in every trial, such as a key that does not exist.
    """
    overrides = [text for text in arguments if not text.lstrip("+~").startswith("hydra")]
    return decode(compose([_with_first_value(override) for override in overrides]))


def plugin_defaults(config: RunConfig, arguments: Sequence[str]) -> list[str]:
    """Return settings of the chosen launcher and sweeper, which the command line may change."""
    defaults = []
    if "hydra/launcher=submitit_slurm" in arguments:
        job = Job.of(config, 1, (), ())
        defaults += [
            f"hydra.launcher.nodes={job.nodes}",
            f"hydra.launcher.tasks_per_node={job.ranks_per_node}",
            f"hydra.launcher.cpus_per_task={job.cores_per_rank}",
            f"hydra.launcher.gpus_per_node={job.devices_per_node}",
            f"hydra.launcher.array_parallelism={JOBS_AT_ONCE}",
        ]
    if "hydra/sweeper=optuna" in arguments:
        direction = "maximize" if config.launch.trial_value == "speed" else "minimize"
        defaults.append(f"hydra.sweeper.direction={direction}")
    return defaults


def hydra_task(config: DictConfig) -> float:
    """Run one trial and return its value for a search, as `launch.trial_value` defines it.

    Hydra calls this once per trial. In a Slurm job every task calls it, each for its own rank.
    """
    of_hydra = HydraConfig.get()
    overrides = list(of_hydra.overrides.task)
    folder = Path(of_hydra.runtime.output_dir).absolute()
    try:
        trial = finished_trial(overrides, folder)
    except FrontierError as error:  # hydra would print a traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    given_keys = {override.partition("=")[0] for override in overrides}
    section = {"launch": OmegaConf.to_container(config.launch)}
    settings = with_current_names(section, given_keys)["launch"]
    if trial is None:
        if settings["trial_runner"] == "plan":
            trial = planned_trial(overrides)
        else:
            trial = run_trial(overrides, folder, 60 * float(settings["trial_minutes"]))
    if _is_first_task():
        trial.write(folder)
        print(f"{trial.status:<14}{trial.tokens_per_second:>12.0f} tokens/s  {' '.join(overrides)}")
    if settings["trial_value"] == "speed":
        return trial.tokens_per_second
    return WORST_LOSS if trial.validation_loss is None else trial.validation_loss


def finished_trial(overrides: Sequence[str], folder: Path) -> Trial | None:
    """Return the trial that an earlier start of this sweep has finished; None if it must run.

    Raises:
        ConfigError: the folder contains a trial of another sweep.
        DataError: the trial's file is damaged.
    """
    if not (folder / TRIAL_FILE).exists():
        return None
    earlier = Trial.read(folder)
    if [current_override(text) for text in earlier.overrides] != list(overrides):
        raise ConfigError(
            "hydra.sweep.dir",
            f"{folder.parent}, whose trial {folder.name} has {' '.join(earlier.overrides)}",
            "the folder of the same sweep, or a new one",
            f"choose another folder; trial {folder.name} of this sweep has {' '.join(overrides)}",
        )
    return earlier if earlier.status == "done" else None


def run_trial(overrides: Sequence[str], folder: Path, limit_seconds: float) -> Trial:
    """Run `frontier-llm train` with these overrides in `folder`/run and return the result.

    The run directory of an earlier attempt is removed, because a run without checkpoints cannot
    resume.
    """
    keys = {override.partition("=")[0].lstrip("+~") for override in overrides}
    defaults = [f"{key}={value}" for key, value in TRIAL_DEFAULTS.items() if key not in keys]
    run_dir = folder / "run"
    if _is_first_task():
        shutil.rmtree(run_dir, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "frontier_llm",
        "train",
        *defaults,
        *overrides,
        f"run.dir={run_dir}",
    ]
    start = time.monotonic()
    exit_code, message = _run(command, limit_seconds)
    seconds = time.monotonic() - start
    status = _status(exit_code, message)
    if status != "done":
        return _not_done(overrides, status, message, seconds)
    history = History.read(run_dir)
    speeds = history.column("tokens_per_second")
    return Trial(
        overrides=list(overrides),
        status=status,
        reason="",
        seconds=seconds,
        tokens_per_second=median(speeds[WARM_UP_STEPS:] or speeds),
        peak_bytes=_peak(run_dir),
        loss=history.last("loss"),
        validation_loss=history.last("validation_loss"),
    )


def planned_trial(overrides: Sequence[str]) -> Trial:
    """Return the result that the planner predicts for a trial."""
    start = time.monotonic()
    try:
        with _outside_of_hydra():
            config = decode(compose(overrides))
        ranks, ranks_per_node = ranks_to_plan(config)
        config = choose(config, ranks, ranks_per_node)
        found = estimate(Candidate.of(config, ranks, ranks_per_node))
    except ConfigError as error:
        return _not_done(overrides, "refused", str(error), time.monotonic() - start)
    if found.refused:
        return _not_done(overrides, "refused", f"got: {found.refused}", time.monotonic() - start)
    return Trial(
        overrides=list(overrides),
        status="done",
        reason="",
        seconds=time.monotonic() - start,
        tokens_per_second=found.tokens_per_second,
        peak_bytes=found.peak.total,
        loss=None,
        validation_loss=None,
    )


@contextmanager
def _outside_of_hydra() -> Iterator[None]:
    """Suspend the sweep that hydra runs, because hydra composes only outside of its own runs."""
    of_hydra = GlobalHydra.instance()
    sweep, of_hydra.hydra = of_hydra.hydra, None
    try:
        yield
    finally:
        of_hydra.hydra = sweep


def _not_done(overrides: Sequence[str], status: Status, reason: str, seconds: float) -> Trial:
    return Trial(list(overrides), status, reason[-2000:], seconds, 0.0, None, None, None)


def is_axis(argument: str) -> bool:
    """Return whether an override is an axis: it has several values."""
    try:
        return OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:
        return False


def _is_first_task() -> bool:
    """Return whether this process writes the trial's files: the first task of a Slurm job does."""
    return os.environ.get("SLURM_PROCID", "0") == "0"


def _run(command: Sequence[str], limit_seconds: float) -> tuple[int | None, str]:
    """Run a command; return its exit code (None if it took too long) and its stderr."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, message = process.communicate(timeout=limit_seconds)
        return process.returncode, message
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        _, message = process.communicate(timeout=_TERMINATION_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        _, message = process.communicate()
    return None, f"ended after {limit_seconds / 60:g} minutes (launch.trial_minutes)\n{message}"


def _status(exit_code: int | None, message: str) -> Status:
    """Return the status of a trial from its exit code (None: it took too long) and its stderr."""
    if exit_code is None:
        return "too slow"
    if exit_code == 0:
        return "done"
    if exit_code == 2:
        return "refused"
    return "out of memory" if any(word in message for word in _OUT_OF_MEMORY) else "failed"


def _peak(run_dir: Path) -> int | None:
    """Return the peak memory in bytes of the rank that used most; None if it is unknown."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return max((rank["peak_bytes"] for rank in summary["ranks"]), default=None)


def _check_value(config: RunConfig) -> None:
    """Refuse a search for a value that the planner cannot predict."""
    if config.launch.trial_runner == "plan" and config.launch.trial_value == "loss":
        raise ConfigError(
            "launch.trial_value",
            "loss with launch.trial_runner=plan",
            "speed: the planner does not predict losses",
            "set launch.trial_value=speed or launch.trial_runner=train",
        )


def _check_plugins(arguments: Sequence[str]) -> None:
    """Refuse a launcher or a sweeper whose package is not installed."""
    for argument in arguments:
        if argument.startswith("hydra/") and ("optuna" in argument or "submitit" in argument):
            _check_plugin(argument)


def _check_plugin(argument: str) -> None:
    name = "hydra_optuna_sweeper" if "optuna" in argument else "hydra_submitit_launcher"
    try:
        __import__(f"hydra_plugins.{name}")
    except ImportError:
        key, _, value = argument.partition("=")
        raise ConfigError(
            key,
            value,
            f"the plugin {name.replace('_', '-')}",
            "pip install 'frontier-llm[sweep]', or in a checkout: pip install -e '.[sweep]'",
        ) from None


def _with_first_value(argument: str) -> str:
    """Return an override with only the first of its values."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return argument  # compose explains what is wrong with it
    if not override.is_sweep_override():
        return argument
    return f"{override.get_key_element()}={_first_value(override)}"


def _first_value(override: Override) -> str:
    value = override.value()
    if isinstance(value, IntervalSweep):
        return str(value.start)
    return next(iter(override.sweep_string_iterator()))
