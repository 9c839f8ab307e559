"""Run many points of a configuration: `python train.py -m key=a,b ...`.

Hydra composes the points and hands each to `point`: one after the other on this machine, or as one
Slurm job each (`hydra/launcher=submitit_slurm`), chosen from a grid or by a search
(`hydra/sweeper=optuna`). A point is `train.py` in a process of its own, with few steps and a time
limit. What it came to lies in `point.json`. Its value is its speed, or its validation loss
(`launch.point_value`); a point that is refused by the rules or the planner, fails, or takes too
long has the worst value and ends nothing else. Run again in its folder (`hydra.sweep.dir`), a sweep
keeps the points that are done.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.telemetry.history import History
from tools.compose import CONF, compose
from tools.launch import Job
from tools.point import POINT_FILE, Point, Status

ROOT = CONF.parent
MULTIRUN = ("-m", "--multirun")
POINT_DEFAULTS = {
    "trainer.steps": "12",
    "trainer.evaluate_every_steps": "null",
    "trainer.sample_tokens": "0",
    "checkpoint": "off",
    "telemetry.wandb": "off",
    "telemetry.progress": "false",
}
"""What a point has unless the command line says otherwise: it is there to be measured."""
WARM_UP_STEPS = 2
"""Left out of a point's speed."""
WORST_LOSS = 1e9
"""Of a point that is not done."""
POINTS_AT_ONCE = 4
"""Of those that are Slurm jobs."""
_TERMINATION_SECONDS = 30.0
_OUT_OF_MEMORY = ("out of memory", "SIGKILL")


def sweep(arguments: Sequence[str]) -> int:
    """Run the points of a command line with `-m`; return the exit code.

    Raises:
        ConfigError: a key does not exist, a value has the wrong type, or a plugin is absent.
    """
    wanted = [argument for argument in arguments if argument not in MULTIRUN]
    _check_plugins(wanted)
    config = first_point(wanted)
    sys.argv = [
        "train.py",
        "--multirun",
        *plugin_defaults(config, wanted),
        *wanted,
    ]  # hydra's input
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(point)()
    return 0


def first_point(arguments: Sequence[str]) -> RunConfig:
    """Decode the point that has the first of all values.

    Raises:
        ConfigError: what would be wrong in every point: a key that does not exist, a type.
    """
    ours = [argument for argument in arguments if not argument.lstrip("+~").startswith("hydra")]
    return decode(compose([_first(argument) for argument in ours]))


def plugin_defaults(config: RunConfig, arguments: Sequence[str]) -> list[str]:
    """Return what the chosen launcher and sweeper should know; the command line comes after it."""
    defaults = []
    if "hydra/launcher=submitit_slurm" in arguments:
        job = Job.of(config, 1, (), ())
        defaults += [
            f"hydra.launcher.nodes={job.nodes}",
            f"hydra.launcher.tasks_per_node={job.ranks_per_node}",
            f"hydra.launcher.cpus_per_task={job.cores_per_rank}",
            f"hydra.launcher.gpus_per_node={job.devices_per_node}",
            f"hydra.launcher.array_parallelism={POINTS_AT_ONCE}",
        ]
    if "hydra/sweeper=optuna" in arguments:
        direction = "maximize" if config.launch.point_value == "speed" else "minimize"
        defaults.append(f"hydra.sweeper.direction={direction}")
    return defaults


def point(config: DictConfig) -> float:
    """Run one point; return its value: what `launch.point_value` says, the worst if it failed.

    In a Slurm job of several tasks every task calls this, each for its own rank.
    """
    chosen = HydraConfig.get()
    overrides = list(chosen.overrides.task)
    folder = Path(chosen.runtime.output_dir).absolute()
    try:
        made = done_before(overrides, folder)
    except FrontierError as error:  # hydra would show it as a traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    made = made or run_point(overrides, folder, 60 * float(config.launch.point_minutes))
    if _is_first_task():
        made.write(folder)
        print(f"{made.status:<14}{made.tokens_per_second:>12.0f} tokens/s  {' '.join(overrides)}")
    if config.launch.point_value == "speed":
        return made.tokens_per_second
    return WORST_LOSS if made.validation_loss is None else made.validation_loss


def done_before(overrides: Sequence[str], folder: Path) -> Point | None:
    """Return what a point came to when its sweep ran before; None = it is to be run.

    Raises:
        ConfigError: the folder holds a point of another sweep.
        DataError: the point's file is damaged.
    """
    if not (folder / POINT_FILE).exists():
        return None
    earlier = Point.read(folder)
    if earlier.overrides != list(overrides):
        raise ConfigError(
            "hydra.sweep.dir", f"{folder.parent}, whose point {folder.name} is of "
            + " ".join(earlier.overrides), "the folder of the same sweep, or a new one",
            f"give it another name; this sweep's point {folder.name} is " + " ".join(overrides),
        )  # fmt: skip
    return earlier if earlier.status == "done" else None


def run_point(overrides: Sequence[str], folder: Path, limit_seconds: float) -> Point:
    """Run `train.py` with these overrides in `folder`/run, and read what it came to.

    What an earlier try has left there is removed: a run without checkpoints cannot go on.
    """
    keys = {override.partition("=")[0].lstrip("+~") for override in overrides}
    defaults = [f"{key}={value}" for key, value in POINT_DEFAULTS.items() if key not in keys]
    run_dir = folder / "run"
    if _is_first_task():
        shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "train.py", *defaults, *overrides, f"run.dir={run_dir}"]
    start = time.monotonic()
    code, said = _run(command, limit_seconds)
    seconds = time.monotonic() - start
    status = _status(code, said)
    if status != "done":
        return Point(list(overrides), status, said[-2000:], seconds, 0.0, None, None, None)
    history = History.read(run_dir)
    speeds = history.column("tokens_per_second")
    return Point(
        overrides=list(overrides),
        status=status,
        reason="",
        seconds=seconds,
        tokens_per_second=median(speeds[WARM_UP_STEPS:] or speeds),
        peak_bytes=_peak(run_dir),
        loss=history.last("loss"),
        validation_loss=history.last("validation_loss"),
    )


def _is_first_task() -> bool:
    """Whether this process speaks for its point: of a Slurm job's tasks only one does."""
    return os.environ.get("SLURM_PROCID", "0") == "0"


def _run(command: Sequence[str], limit_seconds: float) -> tuple[int | None, str]:
    """Run a command; return its exit code (None: it took too long) and what it said to stderr."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=limit_seconds)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        _, said = process.communicate(timeout=_TERMINATION_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    return None, f"ended after {limit_seconds / 60:g} minutes (launch.point_minutes)\n{said}"


def _status(code: int | None, said: str) -> Status:
    if code is None:
        return "too slow"
    if code == 0:
        return "done"
    if code == 2:
        return "refused"
    return "out of memory" if any(word in said for word in _OUT_OF_MEMORY) else "failed"


def _peak(run_dir: Path) -> int | None:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return max((rank["peak_bytes"] for rank in summary["ranks"]), default=None)


def _check_plugins(arguments: Sequence[str]) -> None:
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
            key, value, f"the plugin {name.replace('_', '-')}", "pip install -e '.[sweep]'"
        ) from None


def is_axis(argument: str) -> bool:
    """Whether an override has several values."""
    try:
        return OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:
        return False


def _first(argument: str) -> str:
    """Return an override with the first of its values."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return argument  # compose says what is wrong with it
    if not override.is_sweep_override():
        return argument
    return f"{override.get_key_element()}={_first_value(override)}"


def _first_value(override: Override) -> str:
    value = override.value()
    if isinstance(value, IntervalSweep):
        return str(value.start)
    return next(iter(override.sweep_string_iterator()))
