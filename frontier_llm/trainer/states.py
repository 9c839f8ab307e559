"""Shards the model states of one rank, and builds a training step for measurements."""

from functools import partial

import torch

from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.config.run import RunConfig
from frontier_llm.device.kernels import resolve
from frontier_llm.engine.hooks import attach
from frontier_llm.geometry.formats import Feedback, StateFormats
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.build import Model, build_model, unit_readers
from frontier_llm.parallel.groups import Groups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import StateGroups
from frontier_llm.trainer.connect import make_state_groups
from frontier_llm.trainer.progress import LossScale
from frontier_llm.trainer.step import TrainStep


def shard(
    config: RunConfig,
    model: Model,
    groups: Groups,
    traffic: Traffic,
    state_groups: StateGroups | None = None,
) -> ShardedStates:
    """Shard a rank's model states. Collective over all ranks if it makes the `state_groups`."""
    device = next(model.chunks[0].parameters()).device
    states = ShardedStates(
        model.records,
        state_groups or make_state_groups(groups, model.layout),
        _transport(config, traffic, model.transformer.params_dtype, device, groups.rank),
        config.optimizer,
        config.sharding.units_in_flight,
        feedback=Feedback.of(config.collectives),
        fuse_gradients=config.sharding.fused_gradients,
    )
    for chunk in model.chunks:
        # not `Hook`, whose import of the compiler takes time
        attach(unit_readers(chunk, config.model.tied), states, hook=lambda call: call)
    return states


def _transport(
    config: RunConfig, traffic: Traffic, compute_dtype: torch.dtype, device: torch.device, rank: int
) -> Transport:
    """Return what sends states. Kernels are compiled for it only if a format is quantised."""
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


def bare_step(
    config: RunConfig, layout: ResolvedLayout, groups: Groups, device: torch.device
) -> tuple[Model, TrainStep]:
    """Build a step without data, checkpoints and callbacks, to measure it. Collective."""
    kernels = resolve(config.kernels, device)
    model = build_model(layout, groups, device, kernels, config.trainer.seed)
    traffic = Traffic(groups.grid, groups.rank)
    states = shard(config, model, groups, traffic)
    scale = LossScale(config.precision, layout.precision)
    return model, TrainStep(model, states, groups, config, scale, traffic)
