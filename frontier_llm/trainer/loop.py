"""The loop: the order of a run on one screen."""

import math
import time
from pathlib import Path
from types import TracebackType

from frontier_llm.checkpoint.weights import save_weights
from frontier_llm.errors import StopRequested, TrainingError
from frontier_llm.trainer.parts import Parts
from frontier_llm.trainer.reporter import Reporter
from frontier_llm.trainer.schedule import LearningRate
from frontier_llm.trainer.step import StepResult


class Loop:
    """Trains, evaluates, saves and reports. Every rank runs the same loop in step."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._learning_rate = LearningRate.of(parts.config)
        self._reporter = Reporter(parts)
        self._bad_steps = 0

    def __enter__(self) -> "Loop":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._parts.loader.close()
        self._parts.validation_loader.close()
        self._reporter.close(error)

    def run(self) -> None:
        """Train to the last step, or until asked to stop.

        Raises:
            StopRequested: stopped in order, the weights are saved.
            TrainingError: too many steps in a row were not finite, or samples were lost.
        """
        self._reporter.begin(self._parts.evaluation.run())
        stopped_at = None
        for step in range(1, self._config.trainer.steps + 1):
            result = self._step(step)
            if result.stop:
                stopped_at = step
                break
        self._finish(stopped_at)
        if stopped_at is not None:
            reason = self._parts.stop.reason or "another rank was asked to stop"
            raise StopRequested(
                f"stopped after step {stopped_at} ({reason}); the weights are in "
                f"{self._weights_folder}"
            )

    def _step(self, step: int) -> StepResult:
        start = time.perf_counter()
        device = self._parts.accelerator.device
        batches = [batch.to(device) for batch in self._parts.loader.micro_batches(step - 1)]
        rate = self._learning_rate(step)
        result = self._parts.step.run(step, batches, rate, self._parts.stop.requested)
        seconds = time.perf_counter() - start
        self._count_bad_steps(step, result)
        validation_loss = self._parts.evaluation.run() if self._evaluates_at(step) else None
        self._reporter.step(step, result, rate, seconds, validation_loss)
        return result

    def _evaluates_at(self, step: int) -> bool:
        every = self._config.trainer.evaluate_every_steps
        return step == self._config.trainer.steps or (every is not None and step % every == 0)

    def _count_bad_steps(self, step: int, result: StepResult) -> None:
        """Stop a run that only skips; fp16 may skip while its loss scale can still fall."""
        if not result.skipped:
            self._bad_steps = 0
        elif not math.isfinite(result.loss) or self._parts.step.loss_scale.is_at_minimum:
            self._bad_steps += 1
        allowed = self._config.trainer.bad_steps_allowed
        if self._bad_steps > allowed:
            raise TrainingError(
                f"step {step}: the loss is {result.loss:.4g} and the gradient norm "
                f"{result.grad_norm:.4g}, not finite for {self._bad_steps} steps in a row "
                f"(trainer.bad_steps_allowed={allowed}). Nothing was updated in these steps. "
                "Lower optimizer.learning_rate, raise optimizer.warmup_steps, or use "
                "precision=bf16 or fp32"
            )

    def _finish(self, stopped_at: int | None) -> None:
        """Save the weights, then let the model speak and write the report."""
        first_replica = self._parts.groups.at.data == 0
        save_weights(self._weights_folder, self._parts.states.parameters(), first_replica)
        trainer = self._config.trainer
        texts: list[str] = []
        if trainer.sample_tokens and stopped_at is None:
            texts = self._parts.sampler.continue_texts(
                trainer.sample_prompts, trainer.sample_tokens, temperature=0.8, seed=trainer.seed
            )
        self._reporter.finish(texts, stopped_at)

    @property
    def _weights_folder(self) -> Path:
        return Path(self._config.run.dir) / "weights"
