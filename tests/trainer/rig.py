"""A rank's training state without files: for tests that compare layouts."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.device.kernels import resolve
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.model.build import Model, build_model
from frontier_llm.parallel.groups import Groups, make_groups
from frontier_llm.parallel.megatron_cpu import install
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import StateGroups
from frontier_llm.trainer import connect
from frontier_llm.trainer.learning_rate import LearningRate
from frontier_llm.trainer.pipeline import Pipeline
from frontier_llm.trainer.progress import LossScale
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep
from frontier_llm.trainer.step_result import StepResult
from tests.batches import random_batch

CPU = torch.device("cpu")


@dataclass
class Rig:
    config: RunConfig
    groups: Groups
    model: Model
    states: ShardedStates
    step: TrainStep
    traffic: Traffic
    state_groups: StateGroups

    def train(self, steps: int, first: int = 0, saved: int | None = None) -> list[StepResult]:
        """Train some steps; the states are saved after step `saved`, counted from 1."""
        rate = LearningRate.of(self.config)
        return [
            self.step.run(step, self.batches(step - 1), rate(step), will_be_saved=step == saved)
            for step in range(first + 1, first + steps + 1)
        ]

    @contextmanager
    def spoiled(self) -> Iterator[None]:
        """Let a gradient of each backward pass be NaN, so that steps are skipped."""
        parameter = self.model.records[0].parameter
        handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
        yield
        handle.remove()

    def batches(self, step: int) -> list[Batch]:
        """Random tokens that depend on the sample's number alone."""
        data, grid, context = self.config.data, self.groups.grid, self.groups.context
        micro, replica = data.micro_batch, grid.replica(self.groups.rank)
        batches = []
        for m in range(data.global_batch // (grid.replicas * micro)):
            first = step * data.global_batch + (m * grid.replicas + replica) * micro
            batch = random_batch(self.config, range(first, first + micro))
            if context is not None:
                batch = batch.part(context.size, context.rank, data.loss_mean)
            batches.append(batch)
        return batches


def mean_losses(pipeline: Pipeline, batches: list[Batch]) -> list[torch.Tensor]:
    """Return the mean losses of micro-batches that are only read."""
    return pipeline._forward(batches, pipeline._mean)


def make_rig(
    world: World,
    values: dict[str, Any],
    precision: str = "fp32",
    frozen: tuple[str, ...] = (),
    groups_of: Rig | None = None,
    connected: tuple[Groups, StateGroups] | None = None,
) -> Rig:
    """Build a rank from composed values, as trainer/assemble.py does.

    `groups_of` is an earlier rank of the same grid and sharding, whose process groups are used.
    `connected` is what `connect` has returned; without both, groups are made.
    """
    install()
    config = RunConfig.model_validate(values)
    layout = ResolvedLayout.resolve(
        config, world.size, world.ranks_per_node, precision=precision, check_rules=False
    )
    if connected:
        groups = connected[0]
    elif groups_of:
        groups = replace(groups_of.groups, head_stage=layout.head_stage)
    else:
        groups = make_groups(layout.grid, layout.head_stage, communicators=layout.communicators)
    kernels = resolve(config.kernels, CPU)
    model = build_model(layout, groups, CPU, kernels, config.trainer.seed)
    for record in model.records:
        record.parameter.requires_grad_(record.name not in frozen)
    traffic = Traffic(groups.grid, world.rank)
    with pytest.MonkeyPatch.context() as patch:
        if groups_of:
            patch.setattr(connect, "make_hop_groups", lambda *_: groups_of.state_groups.groups)
        state_groups = connected[1] if connected else connect.make_state_groups(groups, layout)
    states = shard(config, model, groups, traffic, state_groups)
    scale = LossScale(config.precision, precision)
    step = TrainStep(model, states, groups, config, scale, traffic)
    return Rig(config, groups, model, states, step, traffic, state_groups)
