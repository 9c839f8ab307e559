"""Run one trial of a sweep in processes of its own, or let the planner predict it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from frontier_lab.sweeps.sweep_trials import TRIAL_FILE, Status, Trial, read_in_order
from frontier_llm.cli.compose import compose
from frontier_llm.cli.group_files import key_of
from frontier_llm.cli.options import TRIAL_VARIABLE
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError
from frontier_llm.launch.world import World
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import estimate
from frontier_llm.telemetry.history import History

TRIAL_DEFAULTS = {
    "trainer.steps": "12",
    "trainer.evaluate_every_steps": "null",
    "trainer.sample_tokens": "0",
    "checkpoint": "off",
    "telemetry.wandb": "off",
    "telemetry.progress": "false",
}
"""Settings of a trial unless the command line gives others: a trial only measures."""
RUN = "run"
"""Name of the run directory in the folder of a trial."""
WARM_UP_STEPS = 2
"""Number of first steps that do not count for a trial's speed."""
_TERMINATION_SECONDS = 30.0
"""Time between SIGTERM and SIGKILL for a trial that takes too long."""
_OUT_OF_MEMORY = ("out of memory", "SIGKILL")
"""Words in the output of a trial that ran out of memory. The kernel then kills with SIGKILL."""


def finished_trial(overrides: Sequence[str], folder: Path) -> Trial | None:
    """Return the trial that an earlier start of this sweep has finished; None if it must run.

    Raises:
        ConfigError: the folder contains a trial of another sweep.
        DataError: the trial's file is damaged.
    """
    if not (folder / TRIAL_FILE).exists():
        return None
    earlier = Trial.read(folder)
    if list(earlier.overrides) != list(overrides):
        got = f"{folder.parent}, whose trial {folder.name} has {' '.join(earlier.overrides)}"
        wants = "the folder of the same sweep, or a new one"
        todo = f"choose another folder; trial {folder.name} of this sweep has {' '.join(overrides)}"
        raise ConfigError("hydra.sweep.dir", got, wants, todo)
    return earlier if earlier.status == "done" else None


def repeated_trial(overrides: Sequence[str], folder: Path) -> Trial | None:
    """Return the trial of the same sweep that had these settings; None if they are new.

    A trial that failed or took too long does not count, because it may succeed now.
    """
    earlier = read_in_order(folder.parent)
    same = (trial for trial in earlier if set(trial.overrides) == set(overrides))
    return next((trial for trial in same if trial.status in ("done", "refused")), None)


def run_trial(overrides: Sequence[str], folder: Path, limit_seconds: float) -> Trial:
    """Run `frontier-llm train` with these overrides in `folder`/run and return the result.

    The run directory of an earlier attempt is removed, because a run without checkpoints cannot
    resume.
    """
    keys = set(map(key_of, overrides))
    defaults = [f"{key}={value}" for key, value in TRIAL_DEFAULTS.items() if key not in keys]
    run_dir = folder / RUN
    if is_first_task():
        shutil.rmtree(run_dir, ignore_errors=True)
    program = [sys.executable, "-m", "frontier_llm", "train"]
    command = [*program, *defaults, *overrides, f"run.dir={run_dir}"]
    start = time.monotonic()
    exit_code, message = _run(command, limit_seconds)
    seconds = time.monotonic() - start
    status = _status(exit_code, message)
    if status != "done":
        return _not_done(overrides, status, message, seconds)
    history = History.read(run_dir)
    ranks: list[dict[str, Any]] = json.loads((run_dir / "summary.json").read_text())["ranks"]
    speeds = history.column("tokens_per_second")
    return Trial(
        overrides=list(overrides),
        status=status,
        reason="",
        seconds=seconds,
        tokens_per_second=median(speeds[WARM_UP_STEPS:] or speeds),
        peak_bytes=max((rank["peak_bytes"] for rank in ranks), default=None),
        loss=history.last("loss"),
        validation_loss=history.last("validation_loss"),
        ranks=len(ranks),
    )


def planned_trial(overrides: Sequence[str], config: RunConfig | None = None) -> Trial:
    """Return the result that the planner predicts for a trial, whose configuration may be given."""
    start = time.monotonic()
    try:
        if config is None:
            with _outside_of_hydra():
                config = decode(compose(overrides))
        ranks, ranks_per_node = ranks_to_plan(config)
        chosen = choose(with_micro_batches(config, ranks), ranks, ranks_per_node)
        found = estimate(Candidate.of(chosen, ranks, ranks_per_node))
        reason = f"got: {found.refused}" if found.refused else ""
    except ConfigError as error:
        reason = str(error)
    seconds = time.monotonic() - start
    if reason:
        return _not_done(overrides, "refused", reason, seconds)
    return Trial(
        overrides=list(overrides),
        status="done",
        reason="",
        seconds=seconds,
        tokens_per_second=found.tokens_per_second,
        peak_bytes=found.peak.total,
        loss=None,
        validation_loss=None,
        ranks=ranks,
        goal=chosen.launch.trial_value,
    )


def derived_overrides(overrides: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a run that follow from the settings of its trial.

    They are the number of processes on this machine, if the trial sets `launch.nodes`, and the
    global batch, if the trial has `launch.trial_micro_batches`.
    """
    sets_nodes = "launch.nodes" in map(key_of, overrides)
    if not sets_nodes and settings["trial_micro_batches"] is None:
        return []
    try:
        with _outside_of_hydra():
            config = decode(compose(overrides))
    except ConfigError:
        return []  # the run refuses its configuration with the same error
    world = World.from_environment(os.environ)
    if world is not None:
        ranks, processes = world.size, []
    elif sets_nodes:
        ranks, per_node = ranks_to_plan(config)
        processes = [f"launch.ranks={ranks}", f"launch.ranks_per_node={per_node}"]
    else:
        ranks, processes = config.launch.ranks, []
    batch = with_micro_batches(config, ranks).data.global_batch
    return [*processes, f"data.global_batch={batch}"]


def with_micro_batches(config: RunConfig, ranks: int) -> RunConfig:
    """Return a configuration whose global batch has `launch.trial_micro_batches` per replica.

    It is unchanged if this key is null, or if the ranks are not a multiple of those of a
    replica, which the rules of the configuration refuse.
    """
    parallel, data = config.parallel, config.data
    replicas, rest = divmod(ranks, parallel.ranks_per_replica)
    if config.launch.trial_micro_batches is None or rest:
        return config
    batch = config.launch.trial_micro_batches * data.micro_batch * replicas
    return config.changed("data", global_batch=batch)


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


def is_first_task() -> bool:
    """Return whether this process writes the trial's files: the first task of a Slurm job does."""
    return os.environ.get("SLURM_PROCID", "0") == "0"


def _run(command: Sequence[str], limit_seconds: float) -> tuple[int | None, str]:
    """Run a command; return its exit code (None if it took too long) and its stderr."""
    environ = {**os.environ, TRIAL_VARIABLE: "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
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
    return None, f"{message}\nended after {limit_seconds / 60:g} minutes (launch.trial_minutes)"


def _status(exit_code: int | None, message: str) -> Status:
    if exit_code is None:
        return "too slow"
    if exit_code == 0:
        return "done"
    if exit_code == 2:
        return "refused"
    return "out of memory" if any(word in message for word in _OUT_OF_MEMORY) else "failed"
