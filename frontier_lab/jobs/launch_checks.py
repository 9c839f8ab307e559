"""Check what needs no device before a job waits in a queue, and predict how far the job comes.

The checks are those of the start of a run: the tokenizer, the corpora and the run directory. Torch
is not imported.
"""

import math
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from frontier_lab.jobs.launch_options import TimeLimit
from frontier_lab.option_values import check_writable
from frontier_llm.checkpoint.folders import step_folders
from frontier_llm.cli.package_files import conf_dir_option
from frontier_llm.cli.run_preparation import lock_run_dir
from frontier_llm.config import RunConfig
from frontier_llm.data.corpus_manifest import MANIFEST_FILE, Manifest
from frontier_llm.data.prepare import check_text, find_prepared
from frontier_llm.data.sample_counts import check_prepared
from frontier_llm.data.tokenizer_source import (
    check_given_tokenizer,
    check_vocabulary,
    open_tokenizer,
    unused_rows,
)
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate
from frontier_llm.planner.step_time import checkpoint_bytes, checkpoint_write_seconds
from frontier_llm.saving.changes import check_initial_tokenizer
from frontier_llm.saving.tiers import shared_folder
from frontier_llm.units import (
    GIB,
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


def check_data(config: RunConfig, ranks: int, overrides: Sequence[str]) -> str:
    """Check the tokenizer and the corpora of a command line; return a line about the corpora.

    Raises:
        ConfigError: the tokenizer cannot be used, or a corpus that takes long is not prepared.
        DataError: a source is absent, cannot be read, or is damaged.
    """
    check_given_tokenizer(config)
    found = find_prepared(config.data)
    name = f"corpus     data={config.data.name}"
    if config.data.kind == "stdlib":
        name += ", the sources of Python's standard library (data=text data.path=PATH: your text)"
    missing = [source for source, folder in found if folder is None]
    if not missing:
        folders = [folder for _, folder in found if folder is not None]
        manifests = [Manifest.load(folder / MANIFEST_FILE) for folder in folders]
        tokenizer = open_tokenizer(folders[0], manifests[0].eod)
        check_vocabulary(config, tokenizer)
        check_prepared(config, ranks, folders)
        check_initial_tokenizer(config, folders[0])
        count = sum(manifest.train.tokens for manifest in manifests)
        tokens = f"{format_count(count)} training tokens"
        text = f"{name}, prepared in {config.data.place}: {tokens}{_epochs(config, count)}"
        return "\nwarning    ".join([text, *unused_rows(config, tokenizer.vocabulary)])
    size = sum(source.size for source in missing)
    text = f"{', '.join(str(source.root) for source in missing)} ({format_bytes(size)})"
    if size <= SMALL_SOURCE:
        check_text(config.data)
        text = f"{name}; the first node prepares {text} when the job starts"
        trained = config.data.known_tokenizer is None  # on the text, when the job starts
        warnings = unused_rows(config, config.data.vocabulary) if trained else ()
        return "\nwarning    ".join([text, *warnings])
    raise ConfigError(
        "data", f"text that is not prepared: {text}",
        "prepared corpora: all nodes of a job would wait for its first node",
        "run this command, and then launch again:\n    "
        f"frontier-llm {conf_dir_option()}{shlex.join(['preprocess', *overrides])}",
    )  # fmt: skip


def _epochs(config: RunConfig, tokens: int) -> str:
    """Return how often a run reads a corpus; each corpus of a blend has a rate of its own."""
    if config.data.kind == "blend" or config.data.objective != "causal":
        return ""
    read = config.trainer.steps * config.data.global_batch * config.data.sequence_length
    return f", read {format_figure(read / max(1, tokens))} times"


def check_run_dir(candidate: Candidate, *, is_given: bool) -> tuple[int, str, str]:
    """Check that a job may write to its run directory, and resume the run in it.

    Without a directory on the command line (`is_given`), the job script makes one below `runs`.

    Returns:
        The step from which the run resumes, or 0, and what is wrong and what to do if the
        checkpoints do not fit on the file system, or two empty texts.
    """
    config = candidate.config
    folder = Path(config.run.dir if is_given else "runs").absolute()
    above = check_writable("run.dir", folder)
    saved: list[int] = []
    if is_given:
        lock_run_dir(config, lock=False)
        saved = [step for step, suffix, _ in step_folders(shared_folder(config)) if not suffix]
    checkpoint, steps = config.checkpoint, config.trainer.steps
    lasting = steps // checkpoint.keep_every_steps if checkpoint.keep_every_steps else 0
    # the oldest one is deleted when the newest one is complete
    written, kept = -(-steps // checkpoint.every_steps), checkpoint.keep + lasting + 1
    count, least = (min(written, most) - len(saved) for most in (kept, 2 + lasting))
    size, free = checkpoint_bytes(candidate), shutil.disk_usage(above).free
    done = max(saved, default=0)
    if checkpoint.mode == "off" or max(0, count) * size <= free:
        return done, "", ""
    needed = f"{counted(count, 'checkpoint')} of {format_bytes(size)}"
    problem = f"{folder} has {format_bytes(free)} free, too little for {needed}"
    if written >= kept:
        problem += f" (checkpoint.keep={checkpoint.keep}, and one that is being written)"
    helps = least < count and least * size <= free
    todo = "lower checkpoint.keep" if helps else "train a smaller model, or set checkpoint=off"
    return done, problem, f"free some space, set run.dir to another file system, or {todo}"


def forecast(
    candidate: Candidate, limit: TimeLimit | None, *, done: int, chain: int, stops: bool
) -> tuple[str, ConfigError | None]:
    """Predict the speed of a job, and how many steps fit in its time limit (None: not known).

    A run that `stops` saves a checkpoint before the limit, as it does under Slurm. Otherwise the
    steps after its last regular checkpoint are lost.

    Returns:
        Lines for the user, and an error if the job would end before it saves anything.
    """
    try:
        found = estimate(candidate)
    except ConfigError as error:
        return f"predicted  nothing: {error.key} is {error.got}", None
    config, seconds, speed = candidate.config, found.time.seconds, _speed(found)
    left, saves = max(0, config.trainer.steps - done), config.checkpoint.mode != "off"
    stop = checkpoint_write_seconds(candidate) if saves else 0.0
    if stops:
        margin = max(60 * config.launch.stop_minutes + 2 * seconds, SIGNAL_SECONDS)
        if stop > margin:
            minutes = math.ceil(stop / 60)
            speed += f"\nwarning    set launch.stop_minutes={minutes} to have time for the last one"
        stop = max(stop, margin)
    if chain > 1 and not saves:
        wants = "checkpoints, from which each job resumes, but checkpoint=off saves none"
        raise ConfigError("--chain", chain, wants, "leave out checkpoint=off or --chain")
    available = math.inf if limit is None else limit.seconds - START_SECONDS - stop
    steps = f"\n           {counted(left, 'step')}"
    if available >= left * seconds:
        of_limit = "" if limit is None else f", of {limit.text}"
        time = _about(START_SECONDS + left * seconds)
        return f"{speed}{steps}: {time} with the start{of_limit}", None
    assert limit is not None
    interval = left or 1 if not saves else 1 if stops else config.checkpoint.every_steps
    saved = max(0, int(available / seconds)) // interval * interval
    if saved == 0:
        why = " (checkpoint=off)" if not saves else "" if stops else " (checkpoint.every_steps)"
        work = counted(interval, "step") + why
        needed = math.ceil((START_SECONDS + stop + interval * seconds) / 60)
        name, _, value = limit.text.partition("=")
        time = f"{name}={needed // 60:02d}:{needed % 60:02d}:00"
        wants = f"at least {time}, for the start, {work} and the end: otherwise nothing is saved"
        return speed, ConfigError(name, value, wants, f"request more time, for example {time}")
    jobs = -(-left // saved)
    text = f"{steps}: all take {jobs} jobs, because {limit.text} has time for {saved}"
    return speed + text + (f" (--chain={jobs})" if stops and chain < jobs else ""), None


def _speed(found: Estimate) -> str:
    candidate = found.candidate
    line = (
        f"predicted  {_about(found.time.seconds)} per step, "
        f"{format_count(found.tokens_per_second * 86400, 2)} tokens per day, "
        f"{format_figure(found.peak.total / GIB)} of "
        f"{candidate.config.cluster.device.memory_gib:g} GiB per device"
    )
    if note := candidate.config.cluster.estimate_note:
        line += f"; {note}"
    if candidate.config.checkpoint.mode != "off":
        line += f"; a checkpoint has {format_bytes(checkpoint_bytes(candidate))}"
        if written := checkpoint_write_seconds(candidate):
            line += f", written in {_about(written)}"
    return line


def _about(seconds: float) -> str:
    """Return a predicted time, with two significant digits up to an hour."""
    return format_seconds(float(format_figure(seconds)) if seconds < 3600 else seconds)
