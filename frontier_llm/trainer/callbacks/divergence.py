"""Ends a run whose loss or gradient is not finite, and asks for a rewind if the loss spikes.

A rewind is a return to the checkpoint before the spike.
"""

import math
from statistics import median

from frontier_llm.errors import TrainingError
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.step_result import StepResult


class Divergence(Callback):
    """Checks the loss and the gradient norm of each step.

    All ranks see the same numbers, so they make the same decisions without collectives. Before this
    callback ends the run, all ranks wait for the checkpoint that is being written.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._config, self._progress = context.config.trainer, context.progress

    def on_step_end(self, end: StepEnd) -> None:
        """Count bad steps, and ask for a rewind after a spike of the loss.

        Raises:
            TrainingError: there were too many bad steps in a row, or too many rewinds.
        """
        self._count_bad_steps(end.result)
        if self.is_spike(end.result):
            self._count_rewind(end.result)
            end.rewind_reason = f"the loss spiked to {end.result.loss:.4g}"

    def is_spike(self, result: StepResult) -> bool:
        """Return whether the loss is far above recent losses; if not, add it to the recent losses.

        The recent losses are counters of the run: a resumed run judges like one without stops. A
        step whose update was skipped is never a spike, because it did not change the model.
        """
        factor, window = self._config.spike_factor, self._config.spike_window
        if result.skipped or factor is None:
            return False
        recent = self._progress.recent_losses
        if len(recent) == window and result.loss > factor * median(recent):
            return True
        self._progress.recent_losses = [*recent, result.loss][-window:]
        return False

    def _count_bad_steps(self, result: StepResult) -> None:
        """Count skipped steps in a row, and end the run if there are too many.

        In fp16 a step counts only if its loss is not finite or the loss scale cannot be lowered.
        """
        progress, allowed = self._progress, self._config.bad_steps_allowed
        loss_scale = self.context.train_step.loss_scale
        if not result.skipped:
            progress.bad_steps = 0
        elif not math.isfinite(result.loss) or loss_scale.is_at_minimum:
            progress.bad_steps += 1
        if progress.bad_steps > allowed:
            self._end_run(
                f"step {progress.step}: the loss is {result.loss:.4g} and the gradient norm "
                f"{result.grad_norm:.4g}, not finite for {progress.bad_steps} steps in a row "
                f"(trainer.bad_steps_allowed={allowed}). These steps were not applied. "
                "Lower optimizer.learning_rate, raise optimizer.warmup_steps, or use "
                "precision=bf16 or fp32"
            )

    def _count_rewind(self, result: StepResult) -> None:
        """Count a rewind; end the run after too many rewinds."""
        progress, allowed = self._progress, self._config.rewinds_allowed
        if progress.rewinds >= allowed:
            self._end_run(
                f"step {progress.step}: the loss spiked to {result.loss:.4g} after "
                f"{progress.rewinds} rewinds (trainer.rewinds_allowed={allowed}). Lower "
                "optimizer.learning_rate, or look at the samples of these steps in ledger.jsonl"
            )
        progress.rewinds += 1

    def _end_run(self, message: str) -> None:
        """Wait until the checkpoint being written is committed, then end the run.

        Raises:
            TrainingError: always, with this message.
        """
        with self.context.control.watchdog.phase("checkpoint"):
            self.context.checkpoints.finish()
        raise TrainingError(message)
