"""How the ranks of a run are replaced when they die (`recovery.enabled`)."""

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.run_preparation import corpus_folders, failure_folder
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.elastic import fitting_ranks
from frontier_llm.launch.cores import check_survival
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.launch.rendezvous import connections_of
from frontier_llm.launch.world import World
from frontier_llm.membership.coordinator import Replacing
from frontier_llm.saving.run_directory import recorded_steps

if TYPE_CHECKING:
    from torch.distributed import Store


def ranks_of(config: RunConfig, tasks: int | None) -> int:
    """Return the number of ranks; of `tasks` of srun the last `recovery.spares` wait for a rank."""
    if config.recovery.enabled:
        check_survival(os.environ)
    if tasks is None or not config.recovery.enabled:
        return tasks or config.launch.ranks
    if config.recovery.spares >= tasks:
        got = f"{config.recovery.spares} of {tasks} tasks"
        wants = "fewer than the tasks of srun"
        todo = "start more nodes (sbatch -N), or lower recovery.spares"
        raise ConfigError("recovery.spares", got, wants, todo)
    return tasks - config.recovery.spares


def train_as_agent(
    config: RunConfig, corpora: str, world: World, store: "Store", threads: int
) -> int:
    """Be one of the tasks of srun, which forks the processes of a rank; return the exit code."""
    if world.launcher != "slurm":
        wants = "a start by frontier-llm train on one machine, or by srun"
        todo = "set recovery.enabled=false, and let torchrun restart the ranks (--max-restarts)"
        raise ConfigError("recovery.enabled", "true under torchrun", wants, todo)
    import torch

    torch.set_num_threads(1)  # this process forks, and must not have a thread pool
    from frontier_llm.membership.agents import TaskJob, run_agent
    from frontier_llm.recovery.generations import run_member

    options = LaunchOptions(
        ranks=ranks_of(config, world.size),
        failure_dir=failure_folder(config),
        threads=threads,
        connections=connections_of(config, has_roster=True),
        store_timeout=timedelta(seconds=config.launch.timeout_seconds),
    )
    world = world.with_ranks_per_node(config.launch.ranks_per_node)
    job = TaskJob(
        world=world,
        store=store,
        target=partial(run_member, config, corpus_folders(corpora)),
        options=options,
        replacing=replacing(config, world.ranks_per_node),
    )
    return run_agent(job)


def replacing(config: RunConfig, ranks_per_node: int = 1) -> Replacing:
    """Return whether and how ranks are replaced; `ranks_per_node` is 1 on a single node."""
    run_dir, recovery = Path(config.run.dir), config.recovery

    def fitting(ranks: int) -> int | None:
        return fitting_ranks(config.parallel, config.data, ranks) if config.launch.elastic else None

    watchdog = config.watchdog
    return Replacing(
        run_dir=run_dir,
        spares=recovery.spares if recovery.enabled else 0,
        tries=recovery.tries if recovery.enabled else 0,
        timeout_seconds=recovery.timeout_seconds,
        steps_done=partial(recorded_steps, run_dir),
        save_seconds=config.checkpoint.timeout_seconds,
        arrival_seconds=max(
            watchdog.first_step_seconds, watchdog.checkpoint_seconds, watchdog.evaluation_seconds
        ),
        together=1 if config.checkpoint.tiers.local.path is None else ranks_per_node,
        fitting=fitting,
    )
