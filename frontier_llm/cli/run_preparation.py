"""What `frontier-llm train` does on one process before the ranks start: the run directory, corpora.

Torch is not imported here.
"""

import os
import sys
from pathlib import Path

from frontier_llm.config import RunConfig
from frontier_llm.config.needed import unused
from frontier_llm.config.reading import check_files
from frontier_llm.launch import failure, slurm
from frontier_llm.launch.cores import crowding
from frontier_llm.trainer import changes, checkpoint_places, run_directory


def lock_run_dir(config: RunConfig) -> None:
    """Lock the run directory; refuse to resume a run whose configuration differs.

    Raises:
        ConfigError: a path does not exist, another process uses the directory, or a key that
            determines the losses has changed and `run.allow_changes` does not name it.
    """
    newest = checkpoint_places.newest_folder(config)
    check_files(config, is_new=newest is None)
    resumes = run_directory.lock_run_dir(
        Path(config.run.dir),
        config.run.resume,
        newest is not None,
        started_again=slurm.started_again(os.environ),
        nodes_may_have=config.checkpoint.tiers.local.path is not None,
    )
    saved = checkpoint_places.saved_config(newest) if resumes and newest else None
    if saved is not None:
        current = config.model_dump(mode="json")
        idle = {key for key, _ in unused(config)}  # they cannot change the losses
        found = changes.changes(saved, current)
        changed = {key: found[key] for key in found if key not in idle}
        changes.refuse(changed, current, config.run.allow_changes)


def prepare_run(config: RunConfig, text: str) -> str:
    """Import the user's callbacks, prepare the corpora, write config.yaml, clear old failures.

    Args:
        config: the checked configuration.
        text: the configuration as YAML.

    Returns:
        The folders of the prepared corpora, one per line, as text that rank 0 can broadcast.
    """
    from rich.progress import Progress

    from frontier_llm.data.run_loader import prepare_for_model

    if config.callbacks:  # a wrong name is refused here, before any process starts
        from frontier_llm.trainer.callbacks.user_callbacks import import_callbacks

        import_callbacks(config.callbacks)

    # Without auto_refresh the bar has no thread, so that this process may fork.
    with Progress(transient=True, auto_refresh=False) as bar:
        task = bar.add_task("corpus", total=1.0)

        def show(stage: str, share_done: float) -> None:
            bar.update(task, description=stage, completed=share_done, refresh=True)

        folders = prepare_for_model(config, show)
    run_directory.write_config(Path(config.run.dir), text)
    failure.clear(failure_folder(config))
    return "\n".join(map(str, folders))


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
