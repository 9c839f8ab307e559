"""One update of the model: forward and backward, agreement, update or skip."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import AnyBatch
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.wire import Sent, pipeline_sent, ring_sent, tensor_bytes
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.phase_timer import PhaseTimer
from frontier_llm.trainer.pipeline import Pipeline
from frontier_llm.trainer.totals import Totals


@dataclass(frozen=True)
class Notes:
    """What one rank tells all others along with a step."""

    stop: bool = False
    """It was asked to stop."""
    checkpoint_failed: bool = False
    """Its last checkpoint was not written."""
    digest: int = 0
    """Of the samples it counts (data/digest.py); 0 where another rank counts them."""


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step."""

    loss: float
    """Mean over the step's samples, in nats a token."""
    grad_norm: float
    """Of the whole model, before clipping."""
    samples: int
    """Processed, counted where the loss was computed."""
    skipped: bool
    """Whether the update was left out because a gradient was not finite."""
    loss_scale: float
    """With which the gradients were made."""
    digest: int
    """Of all its samples (data/digest.py)."""
    stop: bool
    """Whether any rank was asked to stop."""
    checkpoint_failed: bool
    """Whether any rank says that the last checkpoint failed."""
    sent: dict[str, Sent]
    """Bytes that all ranks sent, by collective."""
    unquantised: dict[str, Sent]
    """Of those that sent less than they stand for: what it is in the compute format."""


class TrainStep:
    """Runs steps on one rank; every rank runs the same ones."""

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
        self._traffic, self._pieces = traffic, model.pieces
        self._device = next(model.chunks[0].parameters()).device
        self._element_bytes = model.transformer.pipeline_dtype.itemsize
        self._pipeline = Pipeline(model)
        self._totals = Totals(self._device, traffic)
        self.loss_scale, self._before_update = loss_scale, before_update
        self.timer = PhaseTimer(self._device)
        model.transformer.no_sync_func = states.accumulating
        model.transformer.grad_scale_func = self._scale_loss

    def run(
        self, step: int, batches: Sequence[AnyBatch], learning_rate: float, notes: Notes = Notes()
    ) -> StepResult:
        """Make one step.

        Collective over all ranks.

        Args:
            step: its number, from 1: decides its dropout masks.
            batches: this replica's micro-batches, on the device.
            learning_rate: of this step.
            notes: what the other ranks must know of this one.

        Raises:
            TrainingError: not as many samples were processed as the step has.
        """
        self._groups.seed_dropout(self._config.trainer.seed, step)
        self.timer.begin()
        self._states.begin_step(step)
        losses = self._pipeline.losses(batches, train=True)
        self.timer.mark("passes")
        self._states.finish_backward()
        self._count_megatron_traffic(len(batches))
        sums, sent, unquantised = self._totals.reduce(self._share(batches, losses, notes))
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
            checkpoint_failed=sums["checkpoint_failed"] > 0,
            sent=sent,
            unquantised=unquantised,
        )

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss for fp16, and divide it so that the sum over replicas is their mean."""
        return loss * (self.loss_scale.value / self._groups.grid.data)

    def _divisor(self, norm: float) -> torch.Tensor:
        clip = self._config.optimizer.clip_norm
        excess = max(1.0, norm / clip) if clip else 1.0
        return torch.tensor(
            self.loss_scale.value * excess, dtype=torch.float32, device=self._device
        )

    def _share(
        self, batches: Sequence[AnyBatch], losses: Sequence[torch.Tensor], notes: Notes
    ) -> dict[str, float | torch.Tensor]:
        """Give this rank's part of the totals; one rank of a replica has the loss."""
        counts = self._groups.counts_samples
        weighted = [loss * batch.samples for loss, batch in zip(losses, batches, strict=counts)]
        return {
            "squared_norm": self._states.squared_norm(),
            "loss_sum": torch.stack(weighted).sum() if counts else 0.0,
            "samples": sum(batch.samples for batch in batches) if counts else 0,
            "digest": notes.digest if counts else 0,
            "stop": float(notes.stop),
            "checkpoint_failed": float(notes.checkpoint_failed),
        }

    def _check_samples(self, processed: float) -> None:
        expected = self._config.data.global_batch
        if round(processed) != expected:
            raise TrainingError(
                f"{processed:.0f} samples were processed in a step of data.global_batch="
                f"{expected}: throughput and data position would be wrong"
            )

    def _count_megatron_traffic(self, micro_batches: int) -> None:
        """Count what megatron's layers and schedule sent; the volumes are held by a test."""
        grid, rank = self._groups.grid, self._groups.rank
        mine = [p for p in self._pieces if p.stage == self._groups.at.pipeline]
        tensor = sum(tensor_bytes(self._config, piece, self._element_bytes) for piece in mine)
        one = pipeline_sent(self._config, grid, rank, self._pieces, self._element_bytes)
        around = grid.tensor_group(rank)
        self._traffic.add("tensor", ring_sent(grid, rank, around, tensor * micro_batches))
        self._traffic.add("pipeline", Sent(one.intra * micro_batches, one.inter * micro_batches))
