"""Train a model: `frontier-llm train [key=value ...]`, see `frontier-llm train --help`.

This module starts a run. It composes and checks the configuration, locks the run directory and
prepares the corpora. Then it starts the ranks on this machine. Under srun or torchrun, the process
is one of the ranks itself. frontier_llm/recovery/generations.py contains the work of a rank.

Torch is imported as late as possible, so that an invalid configuration is refused within a second.
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from frontier_llm.cli.compose import compose, configured
from frontier_llm.cli.help import asks_for_help, help_text, help_topics
from frontier_llm.cli.kept_defaults import warn_of_kept_defaults
from frontier_llm.cli.machine_defaults import check_devices, refuse_nodes
from frontier_llm.cli.main import load
from frontier_llm.cli.options import MULTIRUN, run_command
from frontier_llm.cli.replaceable import ranks_of, replacing, train_as_agent
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
from frontier_llm.config.rules import check
from frontier_llm.errors import StopRequested
from frontier_llm.launch.coordination import broadcast_from_rank_zero
from frontier_llm.launch.cores import prepare_environment, share
from frontier_llm.launch.failure import exit_without_handlers, report_failure, run_rank
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.launch.rendezvous import MIN_CONNECTIONS, connections_of, make_store
from frontier_llm.launch.stop import StopFlag, wait_for_slurm
from frontier_llm.launch.world import World
from frontier_llm.membership.member import Membership, Place
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.saving import run_directory

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
        print(run_directory.to_yaml(compose(overrides)), end="", flush=True)
        config = configured(overrides).config  # refuses after printing what is refused
        check(config, ranks_of(config, None))
        return 0
    if MULTIRUN & set(arguments):
        return int(load("sweep").main(arguments))
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
    config, text = configure(overrides)
    if {"off": False, "check": False, "dry_run": True}[config.plan]:
        return run_dry(config)
    threads = config.launch.threads or share(config.launch.ranks, os.environ)
    warn_of_crowding(threads, config.launch.ranks)
    prepare_environment(threads, os.environ, config)
    corpora = prepare_run(config, text, config.launch.ranks)
    from frontier_llm.membership.launcher import launch
    from frontier_llm.recovery.generations import run_member  # imported once, before ranks fork

    options = LaunchOptions(
        ranks=config.launch.ranks,
        failure_dir=failure_folder(config),
        ranks_per_node=config.launch.ranks_per_node,
        port=config.launch.port,
        threads=threads,
        connections=connections_of(config, has_roster=True),
        store_timeout=timedelta(seconds=config.launch.timeout_seconds),
    )
    member = partial(run_member, config, corpus_folders(corpora))
    return launch(member, options, replacing(config)).exit_code


def train_as_rank(world: World, overrides: Sequence[str]) -> int:
    """Train as one of the ranks of srun or torchrun, of which rank 0 composes the configuration."""
    prepare_environment(share(world.ranks_per_node, os.environ), os.environ)
    StopFlag.install()
    store, config, text = _meet(world, overrides)
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
        from frontier_llm.recovery.generations import run_member

        placed = world.with_ranks_per_node(config.launch.ranks_per_node)
        run_member(config, corpus_folders(corpora), Membership(Place(0, placed, store)))

    exit_code = run_rank(work, world.rank, failure_folder(config))
    if exit_code:
        exit_code = report_failure(world.rank, world.size, failure_folder(config), exit_code)
    if exit_code == StopRequested.exit_code and world.launcher == "slurm":
        wait_for_slurm(StopFlag.install())
    StopFlag.ignore_signals()
    return exit_code


def _meet(world: World, overrides: Sequence[str]) -> tuple["Store", RunConfig, str]:
    """Compose on rank 0, connect all ranks; return store, configuration and the latter as YAML.

    Rank 0 composes first, because the configuration says how it waits and how many files it opens.
    If it fails, all ranks connect nevertheless, to be told.
    """
    found, failed, quiet, connections = None, None, None, MIN_CONNECTIONS
    if world.rank == 0:
        try:
            config, _ = found = configure(overrides, world.size, world.ranks_per_node)
            connections = connections_of(config, has_roster=config.recovery.enabled)
            # srun does not end the tasks of a job with recovery if one of them dies
            quiet = QUIET if config.recovery.enabled else None
        except Exception as error:
            failed = error

    def composed() -> str:
        if found is None:
            raise failed or AssertionError
        return found[1]

    store = make_store(world, MEETING_TIMEOUT, quiet=quiet, connections=connections)
    text = broadcast_from_rank_zero(world, store, "configuration", composed, MEETING_TIMEOUT)
    return store, found[0] if found else decode(run_directory.from_yaml(text)), text


def configure(
    overrides: Sequence[str], world_size: int | None = None, ranks_per_node: int | None = None
) -> tuple[RunConfig, str]:
    """Compose and check the configuration, and lock the run directory; also return it as YAML.

    `world_size` and `ranks_per_node` are what srun or torchrun has started; None: they have not.
    """
    composed = configured(overrides)
    config = composed.config
    if world_size is None and config.plan != "dry_run":
        refuse_nodes(config, overrides)
    if config.plan == "check":
        check_devices(config)
    if config.plan == "dry_run":
        size, ranks_per_node = ranks_to_plan(config)
    else:
        size = ranks_of(config, world_size)
        composed = composed.fitted(size)
        config = composed.config
        ranks_per_node = config.launch.ranks_per_node or ranks_per_node or size
    config = run_directory.kept_layers(config)
    lines: list[str] = []
    warn_of_kept_defaults(config, overrides, lambda text: lines.append(f"warning    {text}"))
    config = choose(config, size, ranks_per_node, lines.append)
    candidate = Candidate.of(config, size, ranks_per_node)
    if config.plan == "check":
        check_run(candidate, composed, overrides)
    if config.plan != "dry_run":
        lock_run_dir(config)
    for line in lines:  # after the errors, which a user should see first
        print(line, file=sys.stderr)
    return config, composed.to_yaml(config)


def run_dry(config: RunConfig) -> int:
    """Build every pipeline stage without memory and print its size; return the exit code."""
    from frontier_llm.cli.dry_run import print_stages

    print_stages(Candidate.of(config, *ranks_to_plan(config)))
    return 0
