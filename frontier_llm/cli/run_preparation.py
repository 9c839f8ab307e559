"""What `frontier-llm train` does on one process before the ranks start: the run directory, corpora.

Torch is imported only after the first line is printed.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from frontier_llm.cli.console import DelayedProgress, print_line
from frontier_llm.config import RunConfig
from frontier_llm.config.reading import check_files
from frontier_llm.launch import failure, slurm
from frontier_llm.launch.cores import crowding
from frontier_llm.trainer import changes, checkpoint_places, run_directory
from frontier_llm.units import counted, format_bytes

_made: list[Path] = []
"""The run directory and the folders above it that this process has made, the innermost first."""


def lock_run_dir(config: RunConfig, *, lock: bool = True) -> None:
    """Lock the run directory, or only check it; refuse to resume a run that differs.

    Raises:
        ConfigError: a path does not exist, another process uses the directory, or a key that
            determines the losses has changed and `run.allow_changes` does not name it.
    """
    if lock:
        path = Path(config.run.dir).absolute()
        _made[:] = [folder for folder in (path, *path.parents) if not folder.exists()]
    newest = checkpoint_places.newest_folder(config)
    check_files(config, is_new=newest is None)
    resumes = run_directory.lock_run_dir(
        Path(config.run.dir),
        config.run.resume,
        newest is not None,
        started_again=slurm.started_again(os.environ),
        nodes_may_have=config.checkpoint.tiers.local.path is not None,
        lock=lock,
    )
    saved = checkpoint_places.saved_config(newest) if resumes and newest else None
    if saved is not None:
        changes.refuse(changes.changes(saved, config.model_dump(mode="json")), config)


def announce_run(config: RunConfig, ranks: int) -> None:
    """Print the first line of a run: its directory, its ranks, and what is to do for its corpora.

    Numpy is imported here, so the number of threads must have been set.

    Raises:
        ConfigError: the tokenizer cannot be read.
        DataError: a source is unusable, or a prepared corpus is damaged.
    """
    from frontier_llm.data.prepare import unprepared

    size = sum(source.size for source in unprepared(config.data))
    state = f"{format_bytes(size)} of text to prepare" if size else "prepared"
    data = f"corpus {config.data.name} in {config.data.directory}: {state}"
    print_line("start", f"{counted(ranks, 'rank')} in {config.run.dir}; {data}")


def prepare_run(config: RunConfig, text: str, ranks: int) -> str:
    """Announce the run, prepare its corpora, write config.yaml, clear old failures.

    Returns:
        The folders of the prepared corpora, one per line, as text that rank 0 can broadcast.
    """
    announce_run(config, ranks)
    import rich
    import torch

    torch.set_num_threads(1)  # a process with a thread pool must not fork
    from frontier_llm.data.run_loader import prepare_for_model
    from frontier_llm.trainer.initial_tokenizer import check_initial_tokenizer

    if config.callbacks:  # a wrong name is refused here, before any process starts
        from frontier_llm.trainer.callbacks.user_callbacks import import_callbacks

        import_callbacks(config.callbacks)

    if config.data.tokenizer is not None:  # before the hours that a large corpus may take
        check_initial_tokenizer(config, Path(config.data.tokenizer))
    with DelayedProgress(rich.get_console(), lines=True) as progress:
        folders = prepare_for_model(config, progress)
    check_initial_tokenizer(config, folders[0])
    run_directory.write_config(Path(config.run.dir), text)
    failure.clear(failure_folder(config))
    return "\n".join(map(str, folders))


def remove_unused_run_dir(*, ranks_ended: bool) -> None:
    """Remove the run directory if this process has made it and the run was refused before it began.

    Args:
        ranks_ended: whether no rank can be running. Then a refusal that ranks have written is
            removed as well; its message is printed.
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
