"""Shards the model states of one rank, and attaches the hooks that gather them when needed.

The model states are parameters, gradients and optimizer states. frontier_llm/sharding holds them.
"""

from functools import partial

import torch
import torch.distributed as dist

from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.formats import Feedback, StateFormats
from frontier_llm.geometry.inventory import shared_parameters
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups, make_hop_groups, make_stage_groups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import StateGroups
from frontier_llm.trainer.connect import HopGroups
from frontier_llm.trainer.hooks import attach


def shard(
    config: RunConfig,
    model: Model,
    groups: Groups,
    traffic: Traffic,
    sharding_groups: HopGroups | None = None,
) -> ShardedStates:
    """Shard a rank's model states.

    Collective over all ranks if process groups must be made.

    Args:
        config: configuration of the run.
        model: the model chunks of this rank, whose parameters are sharded.
        groups: process groups of this rank.
        traffic: counts the bytes that are sent.
        sharding_groups: groups over which states are sharded; None = this function makes them.
    """
    factors = model.layout.factors
    sharding_groups = sharding_groups or make_hop_groups(groups, factors)
    device = next(model.chunks[0].parameters()).device
    states = ShardedStates(
        model.records,
        StateGroups(
            factors=factors,
            data_rank=groups.coordinates.data,
            groups=sharding_groups,
            tensor_group=groups.tensor,
            tied_groups=_tied_groups(model, groups),
        ),
        _transport(config, traffic, model.transformer.params_dtype, device, groups.rank),
        config.optimizer,
        config.sharding.units_in_flight,
        feedback=Feedback.of(config.collectives),
        fuse_gradients=config.sharding.fused_gradients,
    )
    attach(model, states, config.model.tied)
    return states


def _transport(
    config: RunConfig,
    traffic: Traffic,
    compute_dtype: torch.dtype,
    device: torch.device,
    rank: int,
) -> Transport:
    """Return the object that sends states between ranks, in the formats of the configuration.

    Kernels that quantise are compiled only if some format is quantised.
    """
    wanted = config.kernels if config.collectives.is_quantised else "torch"
    return Transport(
        partial(StateFormats.at, config.collectives),
        traffic,
        choose_kernels(wanted, device),
        compute_dtype,
        device,
        seed=config.trainer.seed + (rank << 16),
        pairwise=config.collectives.pairwise,
    )


def _tied_groups(model: Model, groups: Groups) -> dict[str, dist.ProcessGroup | None]:
    """Return the process groups in which the gradients of tied weights are summed.

    Tied weights are parameters of which several pipeline stages hold copies.

    Returns:
        By the name of the parameter: the group of these stages, None if this rank is in no such
        group.
    """
    shared = shared_parameters(model.layout.model, model.layout.model_chunks)
    stages = {
        name: tuple(sorted({chunk.stage for chunk in chunks})) for name, chunks in shared.items()
    }
    group_of_stages = make_stage_groups(groups, dict.fromkeys(stages.values()))
    return {
        name: group_of_stages[holders]
        for name, holders in stages.items()
        if holders in group_of_stages
    }
