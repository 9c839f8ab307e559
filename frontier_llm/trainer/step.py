"""Runs one training step.

A step has forward and backward passes, one all-reduce of a few numbers over all ranks, and the
update. The update does nothing if a gradient is not finite. On a GPU the host waits only once, for
the sums of the all-reduce, and the update has been submitted before.
"""

from collections.abc import Callable, Collection, Sequence

import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.engine.update import Update, UpdateChoice
from frontier_llm.errors import RankFailure, TrainingError
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import ParameterRecord
from frontier_llm.saving.adaptation import without_cross_attention
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.pipeline import DropoutSeeds, Pipeline
from frontier_llm.trainer.progress import LossScale
from frontier_llm.trainer.step_measurements import PhaseTimer, count_activations
from frontier_llm.trainer.step_result import (
    CHECKPOINT_FAILED,
    SCALARS,
    StepFlags,
    StepResult,
    StepSums,
    choose_by_sums,
    reduce_totals,
)


class TrainStep:
    """Runs the training steps of one rank on its `states`; every rank runs the same steps.

    `loss_scale` is that of fp16, constant 1 in other precisions. `sums` are those of the last step
    whose update was done or skipped; None before the first. `timer` measures the first steps.
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
        self.states, self._groups, self._config = states, groups, config
        self._traffic, self._layout = traffic, model.layout
        self._has_z_loss = bool(config.optimizer.z_loss)
        self.sums: StepSums | None = None
        self._device = next(model.chunks[0].parameters()).device
        loss_mean = config.data.loss_mean
        self._pipeline = Pipeline(model, groups, config.optimizer.z_loss, loss_mean)
        self._dropout = DropoutSeeds(model, groups, config.trainer.seed)
        self._others = without_cross_attention(states)
        self.loss_scale, self._update = loss_scale, Update(states, before_update)
        self.timer = PhaseTimer(self._device, self._pipeline.times)

    def run(
        self,
        step: int,
        batches: Sequence[Batch],
        learning_rate: float,
        flags: Callable[[], StepFlags] = StepFlags,
        *,
        will_be_saved: bool = False,
    ) -> StepResult:
        """Run one step. Collective over all ranks.

        Dropout masks depend on the number of the step, counted from 1. `batches` are the
        micro-batches of this replica, on the device. `flags` returns what this rank tells all
        others, after the passes. If the states will be saved after this step, the updated
        parameters are sent in full (ShardedStates.refresh). Raises a TrainingError if the number of
        samples differs from data.global_batch, and a RankFailure if the all-reduce was aborted.
        """
        self._dropout.step = step
        self.timer.begin()
        self.states.begin_step(step, len(batches))
        if self._groups.context is not None:
            self._groups.context.take_sent()  # what an evaluation sent is not of this step
        # The gradients of all replicas are summed. The update divides their sum by the weight per
        # sample, which is known after the passes: with data.loss_mean=tokens it is the share of
        # labels that the step predicts, else the share of samples that predict one.
        loss_scale = self.loss_scale.value / self._groups.grid.replicas
        losses = self._pipeline.train(batches, self.states, self._dropout, loss_scale)
        self.timer.mark("passes")
        left_out = self._left_out(step)
        self.states.finish_backward(left_out)
        count_activations(self._traffic, self._groups, self._layout, len(batches))
        share = self._share(batches, losses, flags())
        totals = reduce_totals(share, self._device, self._traffic)
        self.timer.mark("reductions")
        scale = self.loss_scale.value
        choice = self._choose(totals, scale)
        skipped, numbers = self._update.run(choice, totals, learning_rate, left_out)
        self._check_ranks(step, numbers[SCALARS.index("ranks")])
        self.sums = StepSums(step, scale, skipped, tuple(numbers))
        self._check_samples(numbers[SCALARS.index("samples")])
        self._update.end(skipped=skipped, saved=will_be_saved)
        self.timer.mark("update")
        self.timer.end()
        self.loss_scale.update(finite=not skipped)
        return self.result(self.sums)

    def result(self, sums: StepSums) -> StepResult:
        """Compute the numbers of a step from its sums."""
        return StepResult.of(sums, self._groups.grid.size, has_z_loss=self._has_z_loss)

    def repeat_update(self, sums: StepSums, learning_rate: float) -> None:
        """Update with the sums that other ranks know, after they were lost on the way to this one.

        All gradients of the step must be complete, which they are if any rank knows the sums. The
        updated parameters are not sent.
        """
        totals = torch.tensor(sums.numbers, dtype=torch.float64, device=self._device)
        choice = self._choose(totals, sums.loss_scale)
        self.states.update(learning_rate, choice.divisor, choice.skip, self._left_out(sums.step))
        self.sums = sums

    def _left_out(self, step: int) -> Collection[ParameterRecord]:
        """Return the parameters that the update of a step leaves as they are."""
        return self._others if step <= self._config.optimizer.cross_attention_steps else ()

    def _choose(self, totals: torch.Tensor, loss_scale: float) -> UpdateChoice:
        clip_norm, samples = self._config.optimizer.clip_norm, self._config.data.global_batch
        return choose_by_sums(totals, loss_scale, clip_norm, samples, self._groups.grid.size)

    def _share(
        self, batches: Sequence[Batch], losses: Sequence[torch.Tensor], flags: StepFlags
    ) -> dict[str, float | torch.Tensor]:
        """Return this rank's addends: of losses its part, of samples those that it counts."""
        groups, has_losses = self._groups, self._groups.counts_losses
        # one rank of a replica counts its samples
        counts = has_losses and groups.grid.context_rank(groups.rank) == 0
        is_first = groups.rank == 0
        loss_mean = self._config.data.loss_mean
        weighted = [loss * batch.samples for loss, batch in zip(losses, batches, strict=has_losses)]
        terms = list(torch.stack(weighted).sum(0)) if has_losses else []  # the second one is z-loss
        return {
            "squared_norm": self.states.squared_norm(),
            "loss_sum": terms[0] if has_losses else 0.0,
            "z_loss_sum": terms[1] if len(terms) > 1 else 0.0,
            "samples": sum(batch.samples for batch in batches) if counts else 0,
            "weight": sum(batch.weight(loss_mean) for batch in batches) if has_losses else 0,
            "digest": flags.digest if counts else 0,
            "stop": float(flags.stop),
            "checkpoint": CHECKPOINT_FAILED * flags.saving.failed + flags.saving.committed,
            "saving_to_run_dir": float(is_first and flags.saving.to_run_dir),
            "saving_to_node": float(is_first and flags.saving.to_node),
            "ranks": 1.0,
        }

    def _check_ranks(self, step: int, counted: float) -> None:
        """Reject sums that lack ranks: an all-reduce that was aborted on a GPU raises no error.

        The states are still those before the step.
        """
        if round(counted) != self._groups.grid.size:
            raise RankFailure(
                f"the sums of step {step} are those of {counted:g} instead of "
                f"{self._groups.grid.size} ranks: a collective was aborted"
            )

    def _check_samples(self, processed: float) -> None:
        expected = self._config.data.global_batch
        if round(processed) != expected:
            raise TrainingError(
                f"{processed:.0f} samples were processed in a step of data.global_batch="
                f"{expected}: throughput and position in the data would be wrong"
            )
