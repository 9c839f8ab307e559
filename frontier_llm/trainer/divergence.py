"""When a run has gone wrong: steps that are not finite, and spikes of the loss."""

import math
from collections import deque
from statistics import median

from frontier_llm.config.trainer import TrainerConfig
from frontier_llm.errors import TrainingError
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.step import StepResult


class Divergence:
    """Watches the steps of a run. Every rank sees the same numbers and decides the same."""

    def __init__(self, config: TrainerConfig, loss_scale: LossScale, progress: Progress) -> None:
        self._config, self._loss_scale, self._progress = config, loss_scale, progress
        self._losses: deque[float] = deque(maxlen=config.spike_window)

    def count_bad_steps(self, result: StepResult) -> None:
        """Count steps that were skipped; fp16 may skip while its loss scale can still fall.

        Raises:
            TrainingError: there were too many in a row.
        """
        progress, allowed = self._progress, self._config.bad_steps_allowed
        if not result.skipped:
            progress.bad_steps = 0
        elif not math.isfinite(result.loss) or self._loss_scale.is_at_minimum:
            progress.bad_steps += 1
        if progress.bad_steps > allowed:
            raise TrainingError(
                f"step {progress.step}: the loss is {result.loss:.4g} and the gradient norm "
                f"{result.grad_norm:.4g}, not finite for {progress.bad_steps} steps in a row "
                f"(trainer.bad_steps_allowed={allowed}). Nothing was updated in these steps. "
                "Lower optimizer.learning_rate, raise optimizer.warmup_steps, or use "
                "precision=bf16 or fp32"
            )

    def is_spike(self, result: StepResult) -> bool:
        """Whether a step's loss is far above those before it; if not, it becomes one of them.

        A step that was skipped changed nothing: there is nothing to go back from.
        """
        if result.skipped:
            return False
        factor = self._config.spike_factor
        known = len(self._losses) == self._losses.maxlen
        if factor is not None and known and result.loss > factor * median(self._losses):
            return True
        self._losses.append(result.loss)
        return False

    def count_rewind(self, result: StepResult) -> None:
        """Count a rewind; forget the losses since.

        Raises:
            TrainingError: there were too many.
        """
        progress, allowed = self._progress, self._config.rewinds_allowed
        if progress.rewinds >= allowed:
            raise TrainingError(
                f"step {progress.step}: the loss spiked to {result.loss:.4g}, and the run has been "
                f"sent back {progress.rewinds} times (trainer.rewinds_allowed={allowed}). Lower "
                "optimizer.learning_rate, or look at the samples that ledger.jsonl names"
            )
        progress.rewinds += 1
        self._losses.clear()
