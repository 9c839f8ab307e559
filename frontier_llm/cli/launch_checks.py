"""Check what needs no device before a job waits in a queue, and predict how far the job comes.

The checks are those of the start of a run: the tokenizer, the corpora and the run directory. Torch
is not imported.
"""

import math
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from frontier_llm.checkpoint.folders import parse_folder
from frontier_llm.cli.launch_options import TimeLimit
from frontier_llm.cli.planned_experiment import conf_dir_option
from frontier_llm.cli.run_preparation import check_resume
from frontier_llm.config import RunConfig
from frontier_llm.data.prepare import unprepared
from frontier_llm.data.source import Source
from frontier_llm.data.tokenizer_source import check_given_tokenizer
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate
from frontier_llm.planner.step_time import checkpoint_bytes, checkpoint_write_seconds
from frontier_llm.trainer import checkpoint_places
from frontier_llm.units import (
    MIB,
    counted,
    format_bytes,
    format_count,
    format_figure,
    format_seconds,
)

SMALL_SOURCE = 64 * MIB
"""Text that the first node of a job prepares within a minute or two, while the others wait."""
START_SECONDS = 300.0
"""Allowance for the start of a job: unpacking, importing and the first collectives."""
SIGNAL_SECONDS = 300.0
"""How long before the end of a job Slurm asks it to stop (`--signal` of the job scripts)."""
_DAY = 86400


def data_line(config: RunConfig, overrides: Sequence[str]) -> str:
    """Check the tokenizer and the corpora; return a line about the corpora.

    Args:
        config: configuration of the job.
        overrides: the command line of which it was composed.

    Raises:
        ConfigError: the tokenizer cannot be used, or a corpus that takes long is not prepared.
        DataError: a source is absent, cannot be read, or is damaged.
    """
    check_given_tokenizer(config)
    missing = unprepared(config.data)
    if not missing:
        return f"corpus     prepared in {config.data.directory}"
    for source in missing:
        _check_readable(source)
    size = sum(source.size for source in missing)
    text = f"{', '.join(str(source.root) for source in missing)} ({format_bytes(size)})"
    if size <= SMALL_SOURCE:
        return f"corpus     the first node prepares {text} when the job starts"
    command = shlex.join(["preprocess", *overrides])
    raise ConfigError(
        "data", f"text that is not prepared: {text}",
        "prepared corpora: all nodes of a job would wait for its first node",
        f"run this command, and then launch again:\n    "
        f"frontier-llm {conf_dir_option()}{command}",
    )  # fmt: skip


def _check_readable(source: Source) -> None:
    for file in source.files:
        if not os.access(file.path, os.R_OK):
            raise DataError(
                f"cannot read {file.path}: permission denied\n"
                "  do: make it readable, or set data.path to another file or folder"
            )


def check_run_dir(candidate: Candidate, *, is_given: bool) -> str | None:
    """Check that a job may write to its run directory, and resume the run in it.

    Args:
        candidate: the layout of the job.
        is_given: whether the command line names the directory. Otherwise the job script makes a new
            one below `runs`.

    Returns:
        What is wrong if the checkpoints do not fit on the file system; else None.

    Raises:
        ConfigError: the directory cannot be written, or its run cannot be resumed like this.
        FrontierError: a file cannot be renamed.
    """
    config = candidate.config
    folder = Path(config.run.dir if is_given else "runs").absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        problem = "cannot be written" if above.is_dir() else "is a file"
        raise ConfigError(
            "run.dir", folder, f"a folder that can be written: {above} {problem}",
            "choose another run.dir, or get write permission",
        )  # fmt: skip
    if is_given:
        check_resume(config)
    checkpoint, steps = config.checkpoint, config.trainer.steps
    if checkpoint.mode == "off":
        return None
    for_ever = steps // checkpoint.keep_every_steps if checkpoint.keep_every_steps else 0
    saved = -(-steps // checkpoint.every_steps)
    # the oldest one is deleted when the newest one is complete
    count = min(saved, checkpoint.keep + for_ever + 1) - (_existing(config) if is_given else 0)
    needed, free = max(0, count) * checkpoint_bytes(candidate), shutil.disk_usage(above).free
    if needed <= free:
        return None
    return (
        f"{folder} has {format_bytes(free)} free, and {counted(count, 'checkpoint')} take "
        f"{format_bytes(needed)} (checkpoint.keep={checkpoint.keep}, and one that is being written)"
    )


def _existing(config: RunConfig) -> int:
    folder = checkpoint_places.shared_folder(config)
    paths = folder.iterdir() if folder.is_dir() else ()
    return sum((parsed := parse_folder(path.name)) is not None and not parsed[1] for path in paths)


def steps_done(config: RunConfig) -> int:
    """Return the step from which a job in this run directory would resume; 0 for a new run."""
    newest = checkpoint_places.newest_folder(config)
    parsed = parse_folder(newest.name) if newest else None
    return parsed[0] if parsed else 0


def forecast(
    candidate: Candidate,
    limit: TimeLimit | None,
    *,
    done: int,
    chain: int,
    stops: bool,
    submit: bool,
) -> str:
    """Return lines with the predicted speed, and how many steps fit in the time limit.

    Args:
        candidate: the layout of the job.
        limit: the time limit of each job; None: it is not known.
        done: steps that the run has made before.
        chain: number of jobs that run one after the other.
        stops: whether the run saves a checkpoint and stops before the limit, as it does under
            Slurm. Otherwise the steps after its last regular checkpoint are lost.
        submit: whether the job is submitted. If not, the limit may come later than this command,
            unless it is on the command line.

    Raises:
        ConfigError: the job would end before it saves anything.
    """
    try:
        found = estimate(candidate)
    except ConfigError as error:
        return f"predicted  nothing: {error.key} is {error.got}"
    config, seconds = candidate.config, found.time.seconds
    left = max(0, config.trainer.steps - done)
    if limit is None or math.isinf(limit.seconds):
        return _speed(found) + f"\n           {counted(left, 'step')}: {_about(left * seconds)}"
    checkpoint = config.checkpoint
    interval = 1 if stops or checkpoint.mode == "off" else checkpoint.every_steps
    stop = checkpoint_write_seconds(candidate)
    speed = _speed(found)
    if stops:
        margin = max(60 * config.launch.stop_minutes + 2 * seconds, SIGNAL_SECONDS)
        if stop > margin and checkpoint.mode != "off":
            minutes = math.ceil(stop / 60)
            speed += f"\nwarning    set launch.stop_minutes={minutes} to have time for the last one"
        stop = max(stop, margin)
    fit = max(0, int((limit.seconds - START_SECONDS - stop) / seconds))
    if fit >= left:
        whole = START_SECONDS + left * seconds
        steps = f"{counted(left, 'step')}: {_about(whole)} with the start"
        return f"{speed}\n           {steps}, of {limit.text}"
    saved = fit // interval * interval
    if saved == 0:
        error = _too_short(limit, START_SECONDS + stop + interval * seconds, interval, stops=stops)
        if submit or not limit.of_script:
            raise error
        return f"{speed}\nwarning    {limit.text} is too short: {error.todo}"
    jobs = -(-left // saved)
    text = f"{limit.text} has time for {saved} of {counted(left, 'step')}: all take {jobs} jobs"
    if stops and chain < jobs:
        text += f" (--chain={jobs})"
    return f"{speed}\n           {text}"


def _speed(found: Estimate) -> str:
    candidate = found.candidate
    config = candidate.config
    memory = config.cluster.device.memory_gib
    line = (
        f"predicted  {_about(found.time.seconds)} per step, "
        f"{format_count(found.tokens_per_second * _DAY, 2)} tokens per day, "
        f"{format_bytes(found.peak.total)} of {memory:g} GiB per device"
    )
    if config.checkpoint.mode != "off":
        line += f"; a checkpoint has {format_bytes(checkpoint_bytes(candidate))}"
        if written := checkpoint_write_seconds(candidate):
            line += f", written in {_about(written)}"
    return line


def _about(seconds: float) -> str:
    """Return a predicted time, with two significant digits up to an hour."""
    return format_seconds(float(format_figure(seconds)) if seconds < 3600 else seconds)


def _too_short(limit: TimeLimit, needed: float, interval: int, *, stops: bool) -> ConfigError:
    hours, minutes = divmod(math.ceil(needed / 60), 60)
    time = f"{hours:02d}:{minutes:02d}:00"
    work = counted(interval, "step") + (" (checkpoint.every_steps)" if interval > 1 else "")
    return ConfigError(
        limit.text.partition("=")[0], limit.text.partition("=")[2],
        f"at least {time}, for the start, {work} and the end: otherwise nothing is saved",
        f"request more time, for example {'--time=' if stops else '-l walltime='}{time}",
    )  # fmt: skip
