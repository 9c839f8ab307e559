"""Train a model: `frontier-llm train [key=value ...]`, see `frontier-llm train --help`.

This module starts a run. It composes and checks the configuration, locks the run directory and
prepares the corpora. Then it starts the ranks on this machine. Under srun or torchrun, the process
is one of the ranks itself. frontier_llm/trainer/assemble.py contains the work of a rank.

Torch is imported as late as possible, so that an invalid configuration is refused within a second.
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.compose import compose, configured, fitted, with_choices
from frontier_llm.cli.help import asks_for_help, help_text, help_topics
from frontier_llm.cli.machine_defaults import check_devices, refuse_nodes
from frontier_llm.cli.options import MULTIRUN, run_command
from frontier_llm.cli.replaceable import ranks_of, train_as_agent, train_on_forked_members
from frontier_llm.cli.run_preparation import (
    check_run,
    corpus_folders,
    failure_folder,
    lock_run_dir,
    prepare_run,
    remove_unused_run_dir,
    warn_of_crowding,
)
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import StopRequested
from frontier_llm.launch.coordination import broadcast_from_rank_zero, run_and_wait_for_all
from frontier_llm.launch.cores import prepare_environment, share
from frontier_llm.launch.launcher import LaunchOptions, Target, launch_with_restarts
from frontier_llm.launch.rank import exit_without_handlers, report_failure, run_rank
from frontier_llm.launch.rendezvous import MIN_CONNECTIONS, connections_of, make_store
from frontier_llm.launch.stop import StopFlag, wait_for_slurm
from frontier_llm.launch.world import World
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.trainer import run_directory

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PRINT_CONFIG = {"--cfg", "--cfg=job"}
"""Options that print the composed configuration and stop; hydra's own programs have the same."""
MEETING_TIMEOUT = timedelta(minutes=5)
"""Limit of the rendezvous. Under srun, nodes may start minutes apart."""
QUIET = timedelta(seconds=60)
"""How long rank 0 waits for further tasks if ranks are replaced and no more tasks come."""
CORPUS_TIMEOUT = timedelta(hours=4)
"""Limit for rank 0 to prepare the corpora while the other ranks wait."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code of the process."""
    if asks_for_help(arguments):
        print(help_text(help_topics(arguments)))
        return 0
    if PRINT_CONFIG & set(arguments):
        overrides = [argument for argument in arguments if argument not in {*PRINT_CONFIG, "job"}]
        print(run_directory.to_yaml(compose(overrides)), end="")
        return 0
    if MULTIRUN & set(arguments):
        from frontier_llm.cli import sweep

        return sweep.main(arguments)
    world = World.from_environment(os.environ)
    try:
        if world is None:
            return train_on_this_machine(arguments)
        code = run_command(lambda: train_as_rank(world, arguments))
    finally:
        remove_unused_run_dir(ranks_ended=world is None)
    exit_without_handlers(code)


def train_on_this_machine(overrides: Sequence[str]) -> int:
    """Start `launch.ranks` processes on this machine and wait for them."""
    text = configure(overrides)
    config = decode(run_directory.from_yaml(text))
    if {"off": False, "check": False, "dry_run": True}[config.plan]:
        return run_dry(config)
    threads = config.launch.threads or share(config.launch.ranks, os.environ)
    warn_of_crowding(threads, config.launch.ranks)
    prepare_environment(threads, os.environ, config)
    corpora = prepare_run(config, text, config.launch.ranks)
    from frontier_llm.trainer.assemble import run  # imported once, before the ranks are forked

    options = LaunchOptions(
        ranks=config.launch.ranks,
        failure_dir=failure_folder(config),
        ranks_per_node=config.launch.ranks_per_node,
        port=config.launch.port,
        threads=threads,
        connections=connections_of(config),
        store_timeout=timedelta(seconds=config.launch.timeout_seconds),
    )

    def target(start: int) -> Target:
        started = run_directory.prepare_restart(config) if start else config
        return partial(run, started, corpus_folders(corpora))

    if config.recovery.enabled:
        return train_on_forked_members(config, corpora, options)
    metrics = partial(run_directory.recorded_steps, Path(config.run.dir))
    return launch_with_restarts(target, options, config.launch.restarts, metrics)


def train_as_rank(world: World, overrides: Sequence[str]) -> int:
    """Train as one of the ranks of srun or torchrun, of which rank 0 composes the configuration."""
    prepare_environment(share(world.ranks_per_node, os.environ), os.environ)
    StopFlag.install()
    store, text = _meet(world, overrides)
    config = decode(run_directory.from_yaml(text))
    if config.plan == "dry_run":
        return run_dry(config) if world.rank == 0 else 0
    prepare = partial(prepare_run, config, text, world.size)
    corpora = broadcast_from_rank_zero(world, store, "corpus", prepare, CORPUS_TIMEOUT)
    threads = config.launch.threads or share(world.ranks_per_node, os.environ)
    if world.rank == 0:
        warn_of_crowding(threads, world.ranks_per_node)
    prepare_environment(threads, os.environ, config)

    if config.recovery.enabled:
        return train_as_agent(config, corpora, world, store, threads)

    def work() -> None:
        import torch

        torch.set_num_threads(threads)
        from frontier_llm.trainer.assemble import run

        run_and_wait_for_all(
            partial(run, config, corpus_folders(corpora)),
            world.with_ranks_per_node(config.launch.ranks_per_node),
            store,
        )

    exit_code = run_rank(work, world.rank, failure_folder(config))
    if exit_code:
        exit_code = report_failure(world.rank, world.size, failure_folder(config), exit_code)
    if exit_code == StopRequested.exit_code and world.launcher == "slurm":
        wait_for_slurm(StopFlag.install())
    StopFlag.ignore_signals()
    return exit_code


def _meet(world: World, overrides: Sequence[str]) -> tuple["Store", str]:
    """Compose the configuration on rank 0, connect all ranks, and return store and configuration.

    Rank 0 composes first, because the configuration says how it waits and how many files it opens.
    If it fails, all ranks connect nevertheless, to be told.
    """
    text, failed, quiet, connections = "", None, None, MIN_CONNECTIONS
    if world.rank == 0:
        try:
            text = configure(overrides, world.size, world.ranks_per_node)
            config = decode(run_directory.from_yaml(text))
            connections = connections_of(config)
            # srun does not end the tasks of a job with recovery if one of them dies
            quiet = QUIET if config.recovery.enabled else None
        except Exception as error:
            failed = error

    def composed() -> str:
        if failed is not None:
            raise failed
        return text

    store = make_store(world, MEETING_TIMEOUT, quiet=quiet, connections=connections)
    return store, broadcast_from_rank_zero(world, store, "configuration", composed, MEETING_TIMEOUT)


def configure(
    overrides: Sequence[str], world_size: int | None = None, ranks_per_node: int | None = None
) -> str:
    """Compose and check the configuration, and lock the run directory; return the YAML.

    `world_size` and `ranks_per_node` are what srun or torchrun has started; None: they have not.
    """
    values = configured(overrides)
    config = decode(values)
    if world_size is None and config.plan != "dry_run":
        refuse_nodes(config, overrides)
    if config.plan == "check":
        check_devices(config)
    if config.plan == "dry_run":
        size, ranks_per_node = ranks_to_plan(config)
    else:
        size = ranks_of(config, world_size)
        values = fitted(values, size)
        ranks_per_node = decode(values).launch.ranks_per_node or ranks_per_node or size
    config = choose(decode(values), size, ranks_per_node, partial(print, file=sys.stderr))
    candidate = Candidate.of(config, size, ranks_per_node)
    if config.plan == "check":
        check_run(candidate, values, overrides)
    if config.plan != "dry_run":
        lock_run_dir(config)
    return run_directory.to_yaml(with_choices(values, config))


def run_dry(config: RunConfig) -> int:
    """Build every pipeline stage without memory and print its size; return the exit code."""
    from frontier_llm.cli.dry_run import print_stages

    print_stages(Candidate.of(config, *ranks_to_plan(config)))
    return 0
