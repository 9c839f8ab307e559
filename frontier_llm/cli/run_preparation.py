"""What `frontier-llm train` does on one process before the ranks start.

It checks memory and names smaller runs that fit, and prepares the run directory and the corpora.

Torch is imported only after the first line is printed.
"""

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frontier_llm.cli.compose import Composed, groups
from frontier_llm.cli.console import DelayedProgress, print_line
from frontier_llm.cli.group_files import file_values, key_of
from frontier_llm.config import RunConfig, decode
from frontier_llm.config.reading import check_files, find_callbacks
from frontier_llm.errors import ConfigError, install_command
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.launch import failure, slurm
from frontier_llm.launch.cores import crowding
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.choice import choose
from frontier_llm.planner.fit_check import LENGTH, Changes, check_fits
from frontier_llm.saving import changes, run_directory, tiers
from frontier_llm.units import counted, format_bytes

RECOMPUTE = ("none", "selective", "full")
"""Values of `recompute`, in the order of the work that they add."""
SHARES = (1, 4)
"""For each of these numbers, the largest model with at most 1/number of the parameters is named."""
_made: list[Path] = []
"""The run directory and the folders above it that this process has made, the innermost first."""


def lock_run_dir(config: RunConfig, *, lock: bool = True) -> None:
    """Lock the run directory, or only check it; refuse to resume a run that differs.

    Raises a ConfigError if a path does not exist, another process uses the directory, or a key of
    the losses or of later checkpoints has changed and `run.allow_changes` does not name it.
    """
    if lock:
        path = Path(config.run.dir).absolute()
        _made[:] = [folder for folder in (path, *path.parents) if not folder.exists()]
    newest = tiers.newest_folder(config)
    check_files(config, is_new=newest is None)
    run_directory.refuse_other_place(config)
    resumes = run_directory.lock_run_dir(
        Path(config.run.dir),
        config.run.resume,
        newest is not None,
        started_again=slurm.started_again(os.environ),
        nodes_may_have=config.checkpoint.tiers.local.path is not None,
        lock=lock,
    )
    saved = tiers.saved_meta(newest) if resumes and newest else None
    if saved is not None and "converted_from" in saved:
        raise ConfigError(
            "run.dir",
            f"{config.run.dir}, a converted model",
            "a new folder, or one in which a run has begun",
            f"set run.init_from={config.run.dir} and another run.dir",
        )
    if saved is not None:
        changes.refuse(changes.changes(saved["config"], config.model_dump(mode="json")), config)


def announce_run(config: RunConfig, ranks: int) -> None:
    """Print the first line of a run: its directory, its ranks, and what is to do for its corpora.

    Numpy is imported here, so the number of threads must have been set.
    """
    from frontier_llm.data.prepare import find_prepared

    size = sum(source.size for source, folder in find_prepared(config.data) if folder is None)
    state = f"{format_bytes(size)} of text to prepare" if size else "prepared"
    data = f"corpus {config.data.name} in {config.data.place}: {state}"
    print_line("start", f"{counted(ranks, 'rank')} in {config.run.dir}; {data}")


def check_start(config: RunConfig) -> None:
    """Refuse, without torch, what would fail after the hours that a large corpus may take."""
    check_files(config, is_new=tiers.newest_folder(config) is None)
    changes.check_initial_model(config)
    find_callbacks(config.callbacks)
    changes.check_initial_tokenizer(config, config.data.known_tokenizer)


def prepare_run(config: RunConfig, text: str, ranks: int) -> str:
    """Announce the run, prepare its corpora, write config.yaml, clear old failures.

    Returns the folders of the corpora, one per line, as text that rank 0 can broadcast.
    """
    announce_run(config, ranks)
    import rich
    import torch

    torch.set_num_threads(1)  # a process with a thread pool must not fork
    from frontier_llm.data.run_loader import prepare_for_model
    from frontier_llm.trainer.callbacks.callback_list import import_callbacks

    check_start(config)
    if config.telemetry.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError(
            "telemetry.tensorboard", "true", "the package tensorboard, which is not installed",
            f"{install_command('tensorboard')}, or set telemetry.tensorboard=false",
        )  # fmt: skip
    import_callbacks(config.callbacks)  # a wrong name is refused here, before any process starts
    with DelayedProgress(rich.get_console(), lines=True) as progress:
        folders = prepare_for_model(config, progress, ranks)
    changes.check_initial_tokenizer(config, folders[0])
    _check_saved_corpus(config, folders)
    run_directory.write_config(Path(config.run.dir), text)
    failure.clear(failure_folder(config))
    return "\n".join(map(str, folders))


def _check_saved_corpus(config: RunConfig, folders: Sequence[Path]) -> None:
    """Refuse to resume with another corpus, before anything in the run directory changes."""
    newest = tiers.newest_folder(config)
    meta = None if newest is None else tiers.saved_meta(newest)
    if newest is not None and meta is not None and "corpus" in meta:
        from frontier_llm.data.corpora import open_all

        found = changes.changes(meta["config"], config.model_dump(mode="json"))
        manifest = open_all(config.data, folders).manifest
        changes.check_corpus(found, config, manifest, meta, newest)


def remove_unused_run_dir(*, ranks_ended: bool) -> None:
    """Remove the run directory if this process has made it and the run was refused before it began.

    If no rank can be running (`ranks_ended`), a refusal that ranks have written is removed as
    well; its message is printed.
    """
    if not _made:
        return
    folder, failures = _made[0], _made[0] / run_directory.FAILURES
    own = [run_directory.LOCK, run_directory.CONFIG, f"{run_directory.CONFIG}.sha256"]
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} - {*own, run_directory.FAILURES}:
            return
        cause = failure.read_cause(failures)
        if ranks_ended and cause is not None and cause.kind == "user":
            failure.clear(failures)
        if failures.exists():
            failures.rmdir()  # fails if there is a failure to look at
        for name in own:
            (folder / name).unlink(missing_ok=True)
        for made in _made:
            made.rmdir()


def corpus_folders(text: str) -> list[Path]:
    """Return the folders from the text that `prepare_run` returned on this rank or on rank 0."""
    return [Path(folder) for folder in text.splitlines()]


def failure_folder(config: RunConfig) -> Path:
    """Return the folder where a failing rank writes its error."""
    return Path(config.run.dir) / run_directory.FAILURES


def warn_of_crowding(threads: int, ranks: int) -> None:
    """Print a warning when the ranks of a node run more threads than there are cores."""
    if warning := crowding(threads, ranks, os.environ):
        print(warning, file=sys.stderr)


def check_run(candidate: Candidate, run: Composed, overrides: Sequence[str]) -> None:
    """Refuse a run that does not fit in memory.

    The message names changes, each with the memory of a run whose command line has this change.
    """

    def composed(change: str, ranks: int) -> RunConfig:
        keys = set(map(key_of, change.split()))
        kept = [word for word in overrides if key_of(word) not in keys]
        with redirect_stderr(io.StringIO()):  # what is chosen for a run that is not started
            changed = Composed.of([*kept, *change.split()]).fitted(ranks).config
        return choose(changed, ranks, candidate.grid.ranks_per_node)

    check_fits(candidate, smaller_runs(run, overrides), composed)


def smaller_runs(run: Composed, overrides: Sequence[str]) -> Iterator[Changes]:
    """Yield groups of changes; in each group, those that change a run least come first.

    The first group are shorter samples, if the command line sets their length. There is a group for
    each other optimizer, with more and more recomputation, and two for smaller models of the same
    design, the largest first. There are none for an experiment, nor of a section of which the
    command line sets keys: these keys may not suit another file.
    """
    given = list(map(key_of, overrides))
    sections = {key.partition(".")[0] for key in given if "." in key}
    if "experiment" in given:
        return
    values, config = run.values, run.config
    if LENGTH in given:
        powers = range((config.data.sequence_length - 1).bit_length() - 1, 2, -1)
        lengths = (
            (1 << power, config.changed("data", sequence_length=1 << power)) for power in powers
        )
        yield ((f"{LENGTH}={length}", changed) for length, changed in lengths)
    if "optimizer" not in sections:
        for name in groups()["optimizer"]:
            yield _other_optimizer(values, config, name)
    if "model" not in sections:
        yield from (_smaller_models(values, config, share) for share in SHARES)


def _other_optimizer(values: Mapping[str, Any], config: RunConfig, name: str) -> Changes:
    for recompute in RECOMPUTE[RECOMPUTE.index(config.recompute) :]:
        more = "" if recompute == config.recompute else f" recompute={recompute}"
        changed = _changed(values, "optimizer", name, recompute=recompute)
        if changed and changed.optimizer.name != config.optimizer.name:
            yield f"optimizer={name}{more}", changed


def _smaller_models(values: Mapping[str, Any], config: RunConfig, share: int) -> Changes:
    """Yield the smaller models with the same positions, norms and activations."""

    def size(config: RunConfig) -> int:
        return count_parameters(config.model, config.data.sequence_length)

    def design(config: RunConfig) -> tuple[str, ...]:
        model = config.model
        return model.kind, model.positions, model.norm, model.activation

    found = {name: _changed(values, "model", name) for name in groups()["model"]}
    same = {name: c for name, c in found.items() if c and design(c) == design(config)}
    for name, changed in sorted(same.items(), key=lambda item: -size(item[1])):
        if size(changed) < size(config) / share:
            yield f"model={name}", changed


def _changed(values: Mapping[str, Any], group: str, name: str, **others: str) -> RunConfig | None:
    """Return the configuration with another file of a group; None if the file is incomplete."""
    try:
        return decode({**values, group: file_values(group, name), **others})
    except ConfigError:  # a base of other files
        return None
