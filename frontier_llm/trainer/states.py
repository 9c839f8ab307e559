"""Shards the model states of one rank, and attaches them to the modules."""

from functools import partial

import torch
import torch.distributed as dist

from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.inventory import shared_parameters
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups, make_digit_groups, make_stage_groups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import StateGroups
from frontier_llm.trainer.connect import DigitGroups
from frontier_llm.trainer.hooks import attach


def shard(
    config: RunConfig,
    model: Model,
    groups: Groups,
    traffic: Traffic,
    digits: DigitGroups | None = None,
) -> ShardedStates:
    """Shard a rank's model states.

    Collective over all ranks if process groups must be made.

    Args:
        config: of the run.
        model: its parameters are sharded.
        groups: process groups of this rank.
        traffic: counts the bytes that are sent.
        digits: groups over which states are sharded; None = they are made here.
    """
    factors = model.layout.factors
    digits = digits or make_digit_groups(groups, factors)
    device = next(model.chunks[0].parameters()).device
    states = ShardedStates(
        model.records,
        StateGroups(
            factors=factors,
            data_rank=groups.at.data,
            params_group=digits["params"],
            grads_group=digits["grads"],
            optimizer_group=digits["optimizer"],
            replica_group=digits["replica"],
            tensor_group=groups.tensor,
            tied_groups=_tied_groups(model, groups),
        ),
        _transport(config, traffic, model.transformer.params_dtype, device, groups.rank),
        config.optimizer,
        config.sharding.units_in_flight,
        feedback=config.collectives.error_feedback,
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
    """Return what sends the states. Kernels are compiled only if something is quantised."""
    wanted = config.kernels if config.collectives.is_quantised else "torch"
    return Transport(
        partial(StateFormats.at, config.collectives),
        traffic,
        choose_kernels(wanted, device),
        compute_dtype,
        device,
        seed=config.trainer.seed + (rank << 16),
    )


def _tied_groups(model: Model, groups: Groups) -> dict[str, dist.ProcessGroup | None]:
    """Return, by parameter, the group of the stages that hold copies of it (tied weights)."""
    shared = shared_parameters(model.layout.model, model.layout.model_chunks)
    stages = {
        name: tuple(sorted({chunk.stage for chunk in chunks})) for name, chunks in shared.items()
    }
    made = make_stage_groups(groups, dict.fromkeys(stages.values()))
    return {name: made[held] for name, held in stages.items() if held in made}
