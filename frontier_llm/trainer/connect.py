"""Creates the process groups of a rank, and tests those that a step uses."""

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.partition import Hop
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.health.preflight import check_all_ranks, check_groups
from frontier_llm.launch.rendezvous import init_process_group
from frontier_llm.launch.world import World
from frontier_llm.parallel.groups import TIMEOUT, Groups, make_groups, make_hop_groups
from frontier_llm.trainer.checkpoint_places import local_root
from frontier_llm.trainer.spare_folders import remove_spares

if TYPE_CHECKING:
    from torch.distributed import Store

HopGroups = dict[Hop, dist.ProcessGroup]
"""The process groups over which states are sharded, by hop (geometry/partition.py)."""
NO_TIMEOUT = timedelta(days=1)
"""NCCL's timeout ends the process without naming the late rank, while the watchdog names the rank.
With this value, NCCL's timeout never comes before the watchdog's limits."""


def connect(
    config: RunConfig,
    layout: ResolvedLayout,
    world: World,
    store: "Store",
    accelerator: Accelerator,
) -> tuple[Groups, HopGroups]:
    """Make all process groups of a rank, in the same order on all ranks, and test those in use.

    Collective over all ranks. The test of a group is one collective.

    Returns:
        The groups of tensor, pipeline and data parallelism, and the groups over which states are
        sharded.

    Raises:
        ConfigError: `collectives.backend` cannot be used here.
        LaunchError: ranks are absent or misplaced, or a group does not work. The message names the
            ranks.
    """
    remove_spares(config, world)  # before the free space is compared with a checkpoint's size
    copies = local_root(config) if config.recovery.partner_copies else None
    check_all_ranks(config, layout.nodes_per_copy, world, store, accelerator, copies)
    backend = choose_backend(config, accelerator)
    timeout = _collective_timeout(config, backend)
    init_process_group(world, store, backend, timeout)
    is_long = backend == "gloo" and not config.recovery.enabled
    groups = make_groups(layout.grid, layout.head_stage, TIMEOUT if is_long else timeout)
    of_hops = make_hop_groups(groups, layout.factors)
    # only groups that a step uses, because NCCL allocates buffers at a group's first collective
    named = {
        "whole": dist.group.WORLD,
        "tensor": groups.tensor,
        "pipeline": groups.pipeline,
        "embedding": groups.embedding if layout.model.tied else None,
        **{_name(hop): group for hop, group in of_hops.items()},
    }
    time_limit = timedelta(seconds=config.launch.preflight_seconds)
    check_groups(named, world, store, accelerator.device, time_limit)
    return groups, of_hops


def _name(hop: Hop) -> str:
    return f"{hop.digit} of states, {hop.width} data ranks, {hop.low} apart"


def choose_backend(config: RunConfig, accelerator: Accelerator) -> str:
    """Return the library that sends messages: `nccl` or `gloo`.

    gloo copies the tensors of a GPU through the memory of the host in all-reduces, gathers,
    scatters and all-to-alls. Its point-to-point messages read the memory themselves, so they cannot
    send tensors of a GPU.

    Raises:
        ConfigError: the library cannot be used on this device, or not with a pipeline.
    """
    wanted = config.collectives.backend
    if accelerator.is_cpu:
        if wanted == "nccl":
            raise ConfigError(
                "collectives.backend",
                "nccl on a rank without a GPU",
                "auto, or gloo",
                "set collectives.backend=auto",
            )
        return "gloo"
    if wanted != "gloo":
        return "nccl"
    if config.parallel.pipeline > 1:
        raise ConfigError(
            "parallel.pipeline",
            f"{config.parallel.pipeline} on GPUs with collectives.backend=gloo",
            "1, because gloo cannot send tensors of a GPU from stage to stage",
            "set parallel.pipeline=1, or give each rank its own GPU and set "
            "collectives.backend=auto",
        )
    return "gloo"


def _collective_timeout(config: RunConfig, backend: str) -> timedelta:
    """Return how long a collective may wait for other ranks.

    With gloo this applies only to the group of all ranks; the other groups have `TIMEOUT`.
    """
    if backend == "gloo" and config.recovery.enabled:
        return timedelta(seconds=config.recovery.timeout_seconds)
    if backend == "gloo" or not config.watchdog.enabled:
        return timedelta(seconds=config.launch.timeout_seconds)
    return NO_TIMEOUT
