"""Train a GPT model: `python train.py [key=value ...]`, see `python train.py --help`.

The door of the program. It composes and checks the configuration before anything slow is
imported, and then either starts the ranks on this machine or is one of them. What a rank does is
in frontier_llm/trainer/assemble.py.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import FrontierError, StopRequested
from frontier_llm.parallel import failure, slurm
from frontier_llm.parallel.agreement import made_once, run_and_leave
from frontier_llm.parallel.cores import prepare_environment, share
from frontier_llm.parallel.launcher import INTERRUPTED, Launch, launch
from frontier_llm.parallel.rank import report, run_rank
from frontier_llm.parallel.stop import StopFlag
from frontier_llm.parallel.world import World, make_store
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.check import check_fits
from frontier_llm.trainer import changes, checkpoint_places, run_directory
from tools.compose import compose, fitted
from tools.help import help_text

PRINT = {"--cfg", "--cfg=job"}
"""Print the composed configuration (`--cfg job`, as hydra's programs have it) and stop."""
MULTIRUN = {"-m", "--multirun"}
"""Run many points: lists of values on the command line make a grid (tools/sweep.py)."""
MEETING_TIMEOUT = timedelta(minutes=5)
"""Under srun, nodes may start minutes apart."""
GRACE_SECONDS = 120.0
"""At most; Slurm kills what it wants to end long before."""
CORPUS_TIMEOUT = timedelta(hours=4)
"""For rank 0 to tokenise a corpus while the others wait."""


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit code of the process."""
    try:
        if {"--help", "-h"} & set(arguments):
            print(help_text())
            return 0
        if PRINT & set(arguments):
            overrides = [argument for argument in arguments if argument not in {*PRINT, "job"}]
            print(run_directory.to_yaml(compose(overrides)), end="")
            return 0
        if MULTIRUN & set(arguments):
            from tools.sweep import sweep

            return sweep(arguments)
        world = World.from_environment(os.environ)
        return train_here(arguments) if world is None else leave(train_as_rank(world, arguments))
    except FrontierError as error:
        print(error, file=sys.stderr, end="\n" if str(error) else "")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def train_here(overrides: Sequence[str]) -> int:
    """Start `launch.ranks` processes on this machine and wait for them."""
    text = configure(overrides)
    config = decode(run_directory.from_yaml(text))
    if config.plan == "dry_run":
        return rehearse(config)
    threads = config.launch.threads or share(config.launch.ranks, os.environ)
    prepare_environment(threads, os.environ)
    import torch

    torch.set_num_threads(1)  # a parent with a pool of threads must not fork; see the launcher
    folders = begin(config, text)
    from frontier_llm.trainer.assemble import run  # once, here: the ranks fork with it

    what = Launch(
        ranks=config.launch.ranks,
        failure_dir=failures(config),
        ranks_per_node=config.launch.ranks_per_node,
        port=config.launch.port,
        threads=threads,
        store_timeout=timedelta(seconds=config.launch.timeout_seconds),
    )
    return launch(partial(run, config, paths(folders)), what)


def train_as_rank(world: World, overrides: Sequence[str]) -> int:
    """Be one rank of srun or torchrun; rank 0 alone composes, and tells the others."""
    prepare_environment(share(world.ranks_per_node, os.environ), os.environ)
    StopFlag.install()
    store = make_store(world, MEETING_TIMEOUT)
    text = made_once(
        world,
        store,
        "configuration",
        lambda: configure(overrides, world.size, world.ranks_per_node),
        MEETING_TIMEOUT,
    )
    config = decode(run_directory.from_yaml(text))
    if config.plan == "dry_run":
        return rehearse(config) if world.rank == 0 else 0
    folders = made_once(world, store, "corpus", lambda: begin(config, text), CORPUS_TIMEOUT)

    def work() -> None:
        import torch

        if config.launch.threads:
            torch.set_num_threads(config.launch.threads)
        from frontier_llm.trainer.assemble import run

        run_and_leave(
            partial(run, config, paths(folders)),
            world.with_nodes_of(config.launch.ranks_per_node),
            store,
        )

    code = run_rank(work, world.rank, failures(config))
    code = report(world.rank, world.size, failures(config), code) if code else 0
    if code == StopRequested.exit_code and world.launcher == "slurm":
        wait_for_slurm(StopFlag.install())
    StopFlag.retire()
    return code


def leave(code: int) -> NoReturn:
    """End a rank at once, as the launcher here does: nothing is left for exit handlers to do.

    Triton's bindings print pages about leaks while Python takes itself down.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for_slurm(flag: StopFlag) -> None:
    """Let Slurm end a rank that it has sent SIGTERM: a job that it preempts, or cancels.

    A preempted job that left by itself would count as failed, and not be requeued.
    """
    if flag.reason == signal.SIGTERM.name:
        time.sleep(GRACE_SECONDS)


def configure(
    overrides: Sequence[str], world_size: int | None = None, ranks_per_node: int | None = None
) -> str:
    """Compose, check and claim the run directory; return the configuration as YAML."""
    values = compose(overrides)
    config = decode(values)
    if config.plan == "dry_run":
        Candidate.of(config, *ranks_to_plan(config))
        return run_directory.to_yaml(values)
    size = world_size or config.launch.ranks
    values = fitted(values, size)
    config = decode(values)
    per_node = config.launch.ranks_per_node or ranks_per_node or size
    candidate = Candidate.of(config, size, per_node)
    if config.plan == "check":
        check_fits(candidate)
    claim(config)
    return run_directory.to_yaml(values)


def rehearse(config: RunConfig) -> int:
    """Build every stage on the meta device and say what it is; return the exit code."""
    from tools.dry_run import rehearse as build_and_print

    build_and_print(Candidate.of(config, *ranks_to_plan(config)))
    return 0


def claim(config: RunConfig) -> None:
    """Take the run directory; a run that goes on there must be this one, or changed on purpose."""
    newest = checkpoint_places.newest_folder(config)
    goes_on = run_directory.claim(
        Path(config.run.dir),
        config.run.resume,
        newest is not None,
        started_again=slurm.started_again(os.environ),
    )
    before = checkpoint_places.saved_config(newest) if goes_on and newest else None
    if before is not None:
        now = config.model_dump(mode="json")
        changes.refuse(changes.changes(before, now), now, config.run.allow_changes)


def begin(config: RunConfig, text: str) -> str:
    """Prepare the corpora and write the run directory; return the corpora's folders, in lines."""
    from rich.progress import Progress

    from frontier_llm.data.corpora import prepare_all

    # No refresher thread: this process may fork.
    with Progress(transient=True, auto_refresh=False) as bar:
        task = bar.add_task("corpus", total=1.0)

        def show(what: str, share_done: float) -> None:
            bar.update(task, description=what, completed=share_done, refresh=True)

        folders = prepare_all(config.data, show)
    run_directory.write_config(Path(config.run.dir), text)
    failure.clear(failures(config))
    return "\n".join(map(str, folders))


def paths(folders: str) -> list[Path]:
    """Read what `begin` returned: on another rank, perhaps."""
    return [Path(folder) for folder in folders.splitlines()]


def failures(config: RunConfig) -> Path:
    """Return the folder where a failing rank leaves its traceback."""
    return Path(config.run.dir) / run_directory.FAILURES


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
