"""Creates the process groups of a rank, and uses each that a run needs once.

torch creates the communicators of NCCL and RCCL at the first message of a group. The call blocks
the host until the other ranks have made it, so no step may create one. `first_uses` lists what a
run uses (geometry/communicators.py), for a test at the start of the run and after ranks were
replaced. (Since 2.22 NCCL opens the connections of an algorithm when a message first uses it, which
also blocks the host. This may still be in a step, whose one order of launches makes it safe.)
"""

from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.communicators import (
    ALL_RANKS,
    CONTEXT,
    STAGES,
    TENSOR,
    hop_name,
    neighbours,
    tied_name,
    tied_stages,
    used_groups,
)
from frontier_llm.geometry.inventory import shared_parameters
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.health.preflight import (
    Trial,
    check_all_ranks,
    check_groups,
    collective_trial,
    message_trial,
)
from frontier_llm.launch.rendezvous import init_process_group
from frontier_llm.launch.world import World
from frontier_llm.parallel.groups import (
    TIMEOUT,
    Groups,
    make_groups,
    make_hop_groups,
    make_stage_groups,
)
from frontier_llm.parallel.lanes import Lane, use_lane
from frontier_llm.saving.tiers import deleted_at_resume, local_root
from frontier_llm.sharding.unit import StateGroups

NO_TIMEOUT = timedelta(days=1)
"""NCCL's timeout ends the process without naming the late rank, while the watchdog names the rank.
With this value, NCCL's timeout never comes before the watchdog's limits."""


def connect(
    config: RunConfig,
    layout: ResolvedLayout,
    world: World,
    store: dist.Store,
    accelerator: Accelerator,
) -> tuple[Groups, StateGroups]:
    """Make all process groups of a rank, in the same order on all ranks, and test those in use.

    Collective over all ranks. The test of a group is its first messages. Returns the groups of
    tensor, pipeline and data parallelism, and the groups over which states are sharded. Raises a
    ConfigError if `collectives.backend` cannot be used here, and a LaunchError that names ranks if
    they are absent or misplaced, or a group does not work.
    """
    local = local_root(config) if config.checkpoint.mode != "off" else None
    old = deleted_at_resume(config, world.rank // world.ranks_per_node)
    check_all_ranks(config, layout.nodes_per_copy, world, store, accelerator, local, old)
    backend = choose_backend(config, accelerator)
    timeout = _collective_timeout(config, backend)
    init_process_group(world, store, backend, timeout)
    is_long = backend == "gloo" and not config.recovery.enabled
    groups = make_groups(
        layout.grid, layout.head_stage, TIMEOUT if is_long else timeout, layout.communicators
    )
    state_groups = make_state_groups(groups, layout)
    trials = first_uses(groups, state_groups, layout)
    time_limit = timedelta(seconds=config.launch.preflight_seconds)
    check_groups(trials, world, store, accelerator.device, time_limit)
    if layout.communicators != "many" and backend == "nccl":
        use_lane(Lane({"few": groups.tensor, "one": None}[layout.communicators]))
    return groups, state_groups


def make_state_groups(groups: Groups, layout: ResolvedLayout) -> StateGroups:
    """Create the groups over which states are sharded. Collective, in one fixed order."""
    stages = _stages_with_copies(layout)
    group_of_stages = make_stage_groups(groups, dict.fromkeys(stages.values()))
    return StateGroups(
        factors=layout.factors,
        data_rank=groups.coordinates.data,
        groups=make_hop_groups(groups, layout.factors),
        tensor_group=groups.tensor,
        tied_groups={
            name: group_of_stages[holders]
            for name, holders in stages.items()
            if holders in group_of_stages
        },
    )


def _stages_with_copies(layout: ResolvedLayout) -> dict[str, tuple[int, ...]]:
    shared = shared_parameters(layout.model, layout.model_chunks)
    return {
        name: tuple(sorted({chunk.stage for chunk in chunks})) for name, chunks in shared.items()
    }


def first_uses(
    groups: Groups, state_groups: StateGroups, layout: ResolvedLayout
) -> Iterator[Trial]:
    """Yield a trial of everything that this rank uses in a run, in one order of all ranks."""
    named: dict[str, dist.ProcessGroup | None] = {
        ALL_RANKS: dist.group.WORLD,
        TENSOR: groups.tensor,
        CONTEXT: None if groups.context is None else groups.context.group,
        STAGES: groups.pipeline,
        **{hop_name(hop): group for hop, group in state_groups.groups.items()},
    }
    for parameter, stages in _stages_with_copies(layout).items():
        named[tied_name(stages)] = state_groups.tied_groups.get(parameter)
    for used in used_groups(layout, groups.coordinates.pipeline, tied_stages(layout)):
        group = named.get(used.name)
        reduces, exchanges = used.ring > 1, used.exchanges
        if group is not None and (reduces or exchanges):
            yield collective_trial(used.name, group, reduces=reduces, exchanges=exchanges)
    ranks = groups.grid.pipeline_group(groups.rank)
    for low, high in message_pairs(groups, layout):  # the connections of this stage with other ones
        yield message_trial(f"{low} and {high}", (ranks[low], ranks[high]), groups.pipeline)


def message_pairs(groups: Groups, layout: ResolvedLayout) -> list[tuple[int, int]]:
    """Return the pairs of stages that exchange messages and of which this stage is one.

    Every second pair of neighbouring stages comes first, so that no pair waits for many others.
    """
    stage = groups.coordinates.pipeline
    pairs = {(min(stage, other), max(stage, other)) for other in neighbours(layout, stage)}
    return sorted(pairs, key=lambda pair: (pair[0] % 2, pair))


def choose_backend(config: RunConfig, accelerator: Accelerator) -> str:
    """Return the library that sends messages: `nccl` or `gloo`.

    gloo copies the tensors of a GPU through the memory of the host in all-reduces, gathers,
    scatters and all-to-alls. Its point-to-point messages read the memory themselves, so they cannot
    send tensors of a GPU. Raises a ConfigError if the library cannot be used on this device, or not
    with a pipeline.
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
    backend = {"auto": "nccl", "nccl": "nccl", "gloo": "gloo"}[wanted]
    if backend == "gloo" and config.parallel.pipeline > 1:
        raise ConfigError(
            "parallel.pipeline",
            f"{config.parallel.pipeline} on GPUs with collectives.backend=gloo",
            "1, because gloo cannot send tensors of a GPU from stage to stage",
            "set parallel.pipeline=1, or give each rank its own GPU and set "
            "collectives.backend=auto",
        )
    return backend


def _collective_timeout(config: RunConfig, backend: str) -> timedelta:
    """Return how long a collective waits; with gloo only one of all ranks, others `TIMEOUT`."""
    if backend == "gloo" and config.recovery.enabled:
        return timedelta(seconds=config.recovery.timeout_seconds)
    if backend == "gloo" or not config.watchdog.enabled:
        return timedelta(seconds=config.launch.timeout_seconds)
    return NO_TIMEOUT
