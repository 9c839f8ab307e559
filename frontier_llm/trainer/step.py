"""One training step: forward and backward passes, agreement of all ranks, update or skip."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import AnyBatch
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.wire import Sent, ring_sent
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.phase_timer import PhaseTimer
from frontier_llm.trainer.pipeline import Pipeline
from frontier_llm.trainer.totals import Totals

_CHECKPOINT_FAILED = 2.0**32
"""Addend for a failed checkpoint; a committed one adds 1, so one number carries both counts."""


@dataclass(frozen=True)
class StepFlags:
    """What one rank tells all other ranks with a step."""

    stop: bool = False
    """Whether this rank was asked to stop."""
    checkpoint_failed: bool = False
    """Whether this rank's last checkpoint failed."""
    checkpoint_committed: bool = False
    """Whether this rank knows that a checkpoint is committed that callbacks have not been told."""
    digest: int = 0
    """Digest of the samples (data/batch.py), on the ranks that count samples; else 0."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of a step that are the same on all ranks."""

    loss: float
    """Mean loss over the samples of the step, in nats per token."""
    grad_norm: float
    """L2 norm of the gradient of the whole model, before clipping."""
    samples: int
    """Samples processed, counted on the ranks that compute the loss."""
    skipped: bool
    """Whether the update was skipped because a gradient was not finite."""
    loss_scale: float
    """Loss scale of the gradients of this step."""
    digest: int
    """Digest of all samples of the step (data/batch.py)."""
    stop: bool
    """Whether any rank was asked to stop."""
    checkpoint_failed: bool
    """Whether the last checkpoint failed on any rank."""
    checkpoint_committed: bool
    """Whether all ranks know that a checkpoint is committed that callbacks have not been told."""
    sent: dict[str, Sent]
    """Bytes that all ranks sent, by collective and link."""
    unquantised: dict[str, Sent]
    """Bytes that the quantised collectives would have sent in the compute format."""


class TrainStep:
    """Runs the training steps of one rank; every rank runs the same steps.

    Attributes:
        loss_scale: of fp16; constant 1 in other precisions.
        timer: measures the phases of the first steps.
    """

    def __init__(
        self,
        model: Model,
        states: ShardedStates,
        groups: Groups,
        config: RunConfig,
        loss_scale: LossScale,
        traffic: Traffic,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._states, self._groups, self._config = states, groups, config
        self._traffic, self._layout = traffic, model.layout
        self._device = next(model.chunks[0].parameters()).device
        self._pipeline = Pipeline(model)
        self._totals = Totals(self._device, traffic)
        self.loss_scale, self._before_update = loss_scale, before_update
        self.timer = PhaseTimer(self._device)
        model.transformer.no_sync_func = states.accumulating
        model.transformer.grad_scale_func = self._scale_loss

    def run(
        self,
        step: int,
        batches: Sequence[AnyBatch],
        learning_rate: float,
        flags: StepFlags = StepFlags(),
    ) -> StepResult:
        """Run one step.

        Collective over all ranks.

        Args:
            step: number of the step, counted from 1; seeds its dropout masks.
            batches: micro-batches of this replica, on the device.
            learning_rate: of this step.
            flags: of this rank.

        Raises:
            TrainingError: the number of samples processed is not data.global_batch.
        """
        self._groups.seed_dropout(self._config.trainer.seed, step)
        self.timer.begin()
        self._states.begin_step(step)
        losses = self._pipeline.losses(batches, train=True)
        self.timer.mark("passes")
        self._states.finish_backward()
        self._count_megatron_traffic(len(batches))
        sums, sent, unquantised = self._totals.reduce(self._share(batches, losses, flags))
        self.timer.mark("reductions")
        self._check_samples(sums["samples"])
        scale = self.loss_scale.value
        norm = math.sqrt(sums["squared_norm"]) / scale
        finite = math.isfinite(norm) and math.isfinite(sums["loss_sum"])
        if finite:
            self._before_update()
            self._states.step(learning_rate, self._divisor(norm))
        else:
            self._states.skip()
        self.timer.mark("update")
        self.timer.end()
        self.loss_scale.update(finite)
        return StepResult(
            loss=sums["loss_sum"] / sums["samples"],
            grad_norm=norm,
            samples=round(sums["samples"]),
            skipped=not finite,
            loss_scale=scale,
            digest=round(sums["digest"]),
            stop=sums["stop"] > 0,
            checkpoint_failed=sums["checkpoint"] >= _CHECKPOINT_FAILED,
            checkpoint_committed=sums["checkpoint"] == self._groups.grid.size,
            sent=sent,
            unquantised=unquantised,
        )

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss for fp16, and divide it by the replicas, whose gradients are summed."""
        return loss * (self.loss_scale.value / self._groups.grid.data)

    def _divisor(self, norm: float) -> torch.Tensor:
        clip = self._config.optimizer.clip_norm
        excess = max(1.0, norm / clip) if clip else 1.0
        return torch.tensor(
            self.loss_scale.value * excess, dtype=torch.float32, device=self._device
        )

    def _share(
        self, batches: Sequence[AnyBatch], losses: Sequence[torch.Tensor], flags: StepFlags
    ) -> dict[str, float | torch.Tensor]:
        """Return this rank's share of the totals. One rank of each replica has the loss."""
        counts = self._groups.counts_samples
        weighted = [loss * batch.samples for loss, batch in zip(losses, batches, strict=counts)]
        return {
            "squared_norm": self._states.squared_norm(),
            "loss_sum": torch.stack(weighted).sum() if counts else 0.0,
            "samples": sum(batch.samples for batch in batches) if counts else 0,
            "digest": flags.digest if counts else 0,
            "stop": float(flags.stop),
            "checkpoint": _CHECKPOINT_FAILED * flags.checkpoint_failed + flags.checkpoint_committed,
        }

    def _check_samples(self, processed: float) -> None:
        expected = self._config.data.global_batch
        if round(processed) != expected:
            raise TrainingError(
                f"{processed:.0f} samples were processed in a step of data.global_batch="
                f"{expected}: throughput and position in the data would be wrong"
            )

    def _count_megatron_traffic(self, micro_batches: int) -> None:
        """Count the bytes that megatron's layers and schedule send; a test checks the formulas."""
        grid, rank = self._groups.grid, self._groups.rank
        layout, activations = self._layout, self._layout.activation_traffic
        mine = layout.chunks_of_stage(self._groups.at.pipeline)
        tensor = sum(activations.tensor_bytes(chunk) for chunk in mine)
        one = activations.pipeline_sent(grid, rank, layout.model_chunks)
        around = grid.tensor_group(rank)
        self._traffic.add("tensor", ring_sent(grid, rank, around, tensor * micro_batches))
        self._traffic.add("pipeline", Sent(one.intra * micro_batches, one.inter * micro_batches))
