"""Builds a training step without data, checkpoints and callbacks, to measure steps."""

import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.device.kernels import resolve
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.build import Model, build_model
from frontier_llm.parallel.groups import Groups
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep


def bare_step(
    config: RunConfig, layout: ResolvedLayout, groups: Groups, device: torch.device
) -> tuple[Model, TrainStep]:
    """Build the model chunks of this rank and its training step.

    Collective over all ranks.

    Args:
        config: configuration of the run.
        layout: its layout.
        groups: process groups of the layout.
        device: device of this rank.
    """
    kernels = resolve(config.kernels, device)
    model = build_model(layout, groups, device, kernels, config.trainer.seed)
    traffic = Traffic(groups.grid, groups.rank)
    states = shard(config, model, groups, traffic)
    scale = LossScale(config.precision, layout.precision)
    return model, TrainStep(model, states, groups, config, scale, traffic)
