"""Runs one training step.

A step has forward and backward passes, one all-reduce of a few numbers over all ranks, and the
update. The update does nothing if a gradient is not finite. On a GPU the host waits only once, for
the sums of the all-reduce, and the update has been submitted before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import AnyBatch
from frontier_llm.device.transfer import HostCopy
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.wire import Sent
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.activation_traffic import count_activations
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.phase_timer import PhaseTimer
from frontier_llm.trainer.pipeline import Pipeline
from frontier_llm.trainer.totals import Totals, read_totals
from frontier_llm.trainer.update_choice import choose_update

_CHECKPOINT_FAILED = 2.0**32
"""Each rank adds this number to a sum if its checkpoint has failed, and 1 if the checkpoint is
committed. One sum thus tells whether any rank has failed, and how many ranks know of the commit."""


@dataclass(frozen=True)
class StepFlags:
    """What one rank tells all other ranks in the all-reduce of a step."""

    stop: bool = False
    """Whether this rank was asked to stop."""
    checkpoint_failed: bool = False
    """Whether this rank's last checkpoint failed."""
    checkpoint_committed: bool = False
    """Whether this rank knows of a committed checkpoint about which callbacks were not told yet."""
    digest: int = 0
    """Digest of this replica's samples (data/batch.py). Only the digest of one rank of each replica
    is used."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of a step that are the same on all ranks."""

    loss: float
    """Mean loss over the samples of the step, in nats per token."""
    grad_norm: float
    """L2 norm of the gradient of the whole model, before clipping."""
    samples: int
    """Number of samples processed by all replicas."""
    skipped: bool
    """Whether the update was skipped because a gradient was not finite."""
    loss_scale: float
    """Factor by which the loss of this step was multiplied (fp16); 1 in other precisions."""
    digest: int
    """Digest of all samples of the step (data/batch.py)."""
    stop: bool
    """Whether any rank was asked to stop."""
    checkpoint_failed: bool
    """Whether the last checkpoint failed on any rank."""
    checkpoint_committed: bool
    """Whether all ranks know of a committed checkpoint about which callbacks were not told yet."""
    sent: dict[str, Sent]
    """Bytes that all ranks sent inside and between nodes, by the name of the collective."""
    unquantised: dict[str, Sent]
    """Bytes that the quantised collectives would have sent in the compute precision."""


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
        model.transformer.grad_scale_func = self._scale_loss

    def run(
        self,
        step: int,
        batches: Sequence[AnyBatch],
        learning_rate: float,
        flags: Callable[[], StepFlags] = StepFlags,
    ) -> StepResult:
        """Run one step.

        Collective over all ranks.

        Args:
            step: number of the step, counted from 1. Dropout masks depend on it.
            batches: micro-batches of this replica, on the device.
            learning_rate: learning rate of this step.
            flags: returns what this rank tells all other ranks; called after the passes.

        Raises:
            TrainingError: the number of samples processed differs from data.global_batch.
        """
        self._groups.seed_dropout(self._config.trainer.seed, step)
        self.timer.begin()
        self._states.begin_step(step, len(batches))
        losses = self._pipeline.losses(batches, train=True)
        self.timer.mark("passes")
        self._states.finish_backward()
        count_activations(self._traffic, self._groups, self._layout, len(batches))
        totals = self._totals.reduce(self._share(batches, losses, flags()))
        self.timer.mark("reductions")
        scale, clip_norm = self.loss_scale.value, self._config.optimizer.clip_norm
        choice = choose_update(totals, scale, clip_norm, self._config.data.global_batch)
        copy = HostCopy(torch.cat([choice.skip.double().view(1), totals]))
        self._before_update()
        self._states.update(learning_rate, choice.divisor, choice.skip)
        skipped, *numbers = copy.tolist()
        sums, sent, unquantised = read_totals(numbers)
        self._check_samples(sums["samples"])
        if skipped:
            self._states.skip()
        else:
            self._states.refresh()
        self.timer.mark("update")
        self.timer.end()
        self.loss_scale.update(finite=not skipped)
        return StepResult(
            loss=sums["loss_sum"] / sums["samples"],
            grad_norm=math.sqrt(sums["squared_norm"]) / scale,
            samples=round(sums["samples"]),
            skipped=bool(skipped),
            loss_scale=scale,
            digest=round(sums["digest"]),
            stop=sums["stop"] > 0,
            checkpoint_failed=sums["checkpoint"] >= _CHECKPOINT_FAILED,
            checkpoint_committed=sums["checkpoint"] == self._groups.grid.size,
            sent=sent,
            unquantised=unquantised,
        )

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the loss scale, and divide it by the number of replicas.

        The gradients of the replicas are summed, so the sum is then the gradient of the mean loss.
        """
        return loss * (self.loss_scale.value / self._groups.grid.data)

    def _share(
        self, batches: Sequence[AnyBatch], losses: Sequence[torch.Tensor], flags: StepFlags
    ) -> dict[str, float | torch.Tensor]:
        """Return this rank's addends to the sums over all ranks, by their names in `totals`.

        One rank of each replica has the losses and adds the loss, the samples and their digest.
        """
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
