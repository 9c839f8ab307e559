"""The model states of one rank, cut as the configuration says and hooked to the modules."""

from functools import partial

import torch
import torch.distributed as dist

from frontier_llm.collectives import kernels
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.inventory import copies
from frontier_llm.geometry.layout import resolve_factors
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups, make_digit_groups, make_stage_groups
from frontier_llm.sharding.groups import StateGroups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.connect import DigitGroups
from frontier_llm.trainer.hooks import attach


def shard(
    config: RunConfig,
    model: Model,
    groups: Groups,
    traffic: Traffic,
    digits: DigitGroups | None = None,
) -> ShardedStates:
    """Cut a rank's model states.

    Collective over all ranks if process groups must be made.

    Args:
        config: of the run.
        model: whose parameters are cut.
        groups: where this rank stands.
        traffic: counts what is sent.
        digits: along which states are cut; None: they are made here.
    """
    factors = resolve_factors(config, groups.grid)
    digits = digits or make_digit_groups(groups, factors)
    device = next(model.chunks[0].parameters()).device
    states = ShardedStates(
        model.records,
        StateGroups(
            factors=factors,
            data_rank=groups.at.data,
            a=digits["a"],
            b=digits["b"],
            c=digits["c"],
            d=digits["d"],
            tensor=groups.tensor,
            tied=_tied_groups(config, model, groups),
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
    """Say how states travel; nothing is compiled where nothing is quantised."""
    wanted = config.kernels if config.collectives.is_quantised else "torch"
    return Transport(
        partial(StateFormats.at, config.collectives),
        traffic,
        kernels.resolve(wanted, device),
        compute_dtype,
        device,
        seed=config.trainer.seed + (rank << 16),
    )


def _tied_groups(
    config: RunConfig, model: Model, groups: Groups
) -> dict[str, dist.ProcessGroup | None]:
    """Make the groups of the stages that hold copies of a parameter, by its name."""
    stages = {
        name: tuple(sorted({piece.stage for piece in pieces}))
        for name, pieces in copies(config.model, model.pieces).items()
    }
    made = make_stage_groups(groups, dict.fromkeys(stages.values()))
    return {name: made[held] for name, held in stages.items() if held in made}
