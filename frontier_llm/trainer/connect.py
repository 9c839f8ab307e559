"""A rank's connections: judged, made and used once, before anything is built on them."""

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.geometry.layout import resolve_factors
from frontier_llm.geometry.partition import Digit
from frontier_llm.parallel.groups import TIMEOUT, Groups, make_digit_groups, make_groups
from frontier_llm.parallel.preflight import roll_call, use_groups
from frontier_llm.parallel.world import World, init_process_group

if TYPE_CHECKING:
    from torch.distributed import Store

DigitGroups = dict[Digit, dist.ProcessGroup | None]
BEHIND_THE_WATCHDOG = timedelta(days=1)
"""NCCL ends the process from a thread of its own, with no word of who is late: the watchdog, whose
limits grow with a run's steps, must come first."""


def connect(
    config: RunConfig, world: World, store: "Store", accelerator: Accelerator
) -> tuple[Groups, DigitGroups]:
    """Make all process groups of a rank.

    Collective over all ranks, in one fixed order.

    Returns:
        The groups of the grid, and those along which states are cut.

    Raises:
        LaunchError: ranks are absent or misplaced, or a group does not work; names them.
    """
    roll_call(config, world, store, accelerator)
    timeout = _patience(config, accelerator)
    init_process_group(world, store, accelerator.device, timeout)
    groups = make_groups(
        config.parallel,
        world.ranks_per_node,
        config.trainer.seed,
        TIMEOUT if accelerator.is_cpu else timeout,
    )
    digits = make_digit_groups(groups, resolve_factors(config, groups.grid))
    named = {
        "whole": dist.group.WORLD,
        "tensor": groups.tensor,
        "data": groups.data,
        "pipeline": groups.pipeline,
        "embedding": groups.embedding,
        **{f"states' {digit}": group for digit, group in digits.items()},
    }
    patience = timedelta(seconds=config.launch.preflight_seconds)
    use_groups(named, world, store, accelerator.device, patience)
    return groups, digits


def _patience(config: RunConfig, accelerator: Accelerator) -> timedelta:
    """Return how long a collective may wait."""
    if accelerator.is_cpu or not config.watchdog.enabled:
        return timedelta(seconds=config.launch.timeout_seconds)
    return BEHIND_THE_WATCHDOG
