"""The model states of one rank, cut as the configuration says and hooked to the modules."""

import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.layout import resolve_factors
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups, make_digit_groups
from frontier_llm.sharding.groups import StateGroups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.hooks import attach

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(config: RunConfig, model: Model, groups: Groups, traffic: Traffic) -> ShardedStates:
    """Cut a rank's model states.

    Collective over all ranks: process groups are made.
    """
    factors = resolve_factors(config, groups.grid)
    digits = make_digit_groups(groups, factors)
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
            embedding=groups.embedding,
        ),
        traffic,
        config.optimizer,
        WIRE_DTYPES[config.collectives.grads_format],
        config.sharding.units_in_flight,
    )
    attach(model, states, config.model.tied)
    return states
