"""The loop: the order of a run on one screen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from frontier_llm.data.digest import digest
from frontier_llm.errors import CheckpointError, StopRequested, TrainingError
from frontier_llm.trainer.divergence import Divergence
from frontier_llm.trainer.parts import Parts
from frontier_llm.trainer.reporter import Reporter
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.schedule import LearningRate
from frontier_llm.trainer.step import Notes, StepResult
from frontier_llm.trainer.tracer import Tracer


class Loop:
    """Trains, evaluates, saves and reports. Every rank runs the same loop in step."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._progress = parts.progress
        self._learning_rate = LearningRate.of(parts.config)
        self._reporter = Reporter(parts)
        self._seconds_between = 0.0  # after a step is on record; the next one has them
        self._tracer = Tracer(parts.config, parts.groups, parts.states)
        self._divergence = Divergence(parts.config.trainer, parts.step.loss_scale, parts.progress)

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
            StopRequested: stopped in order, the states are saved.
            CheckpointError: one could not be written, or the run has none that it can go on from.
            TrainingError: the run has diverged, or samples were lost.
        """
        resumed = self._resume()
        if resumed is None and self._config.run.init_from:
            self._parts.restorer.begin_with(Path(self._config.run.init_from))
        self._parts.checkpoints.prepare()
        self._reporter.begin(self._parts.evaluation.run(), resumed)
        stopped = False
        while self._remains and not stopped:
            step = self._progress.step + 1
            with self._parts.watchdog.phase("step", step), self._tracer.step(step):
                stopped = self._step().stop
                self._parts.stragglers.look(self._progress.step)
        with self._parts.watchdog.phase("closing"):
            self._finish(stopped and self._remains)

    @property
    def _remains(self) -> bool:
        return self._progress.step < self._config.trainer.steps

    def _resume(self) -> Resumed | None:
        if self._config.run.resume == "never":
            return None
        resumed = self._go_back(before=None)
        blend = self._parts.blend
        if resumed is not None and blend is not None and (history := resumed.meta.get("blend")):
            blend.go_on(history, self._progress.next_sample)
        return resumed

    def _step(self) -> StepResult:
        start = time.perf_counter()
        parts, progress = self._parts, self._progress
        first, step = progress.next_sample, progress.step + 1
        batches = parts.loader.micro_batches(first)
        notes = Notes(
            stop=parts.stop.look(),
            checkpoint_failed=parts.checkpoints.failed,
            digest=digest(batches) if parts.groups.counts_samples else 0,
        )
        rate = self._learning_rate(step)
        on_device = [batch.to(parts.accelerator.device) for batch in batches]
        result = parts.step.run(step, on_device, rate, notes)
        progress.advance(result.samples, skipped=result.skipped)
        self._reporter.read(step, first, result)
        if result.checkpoint_failed:
            with parts.watchdog.phase("checkpoint"):
                parts.checkpoints.settle()
        seconds = time.perf_counter() - start + self._seconds_between
        validation_loss = None
        if self._evaluates_at(step):
            with parts.watchdog.phase("evaluation"):
                validation_loss = parts.evaluation.run()
        self._reporter.step(result, rate, seconds, validation_loss)
        self._after(result)
        return result

    def _after(self, result: StepResult) -> None:
        """Save, or go back; the step is on record, so nothing that is committed lacks its line."""
        start = time.perf_counter()
        watchdog = self._parts.watchdog
        with self._saved_before_its_end():
            self._divergence.count_bad_steps(result)
        if self._divergence.is_spike(result):
            with watchdog.phase("rewind"):
                self._rewind(result)
        else:
            last = result.stop or not self._remains
            with watchdog.phase("checkpoint"):
                self._parts.checkpoints.after_step(self._progress.step, last=last)
        self._seconds_between = time.perf_counter() - start

    @contextmanager
    def _saved_before_its_end(self) -> Iterator[None]:
        """Where all ranks end together, see the checkpoint that is under way committed first."""
        try:
            yield
        except TrainingError:
            with self._parts.watchdog.phase("checkpoint"):
                self._parts.checkpoints.settle()
            raise

    def _evaluates_at(self, step: int) -> bool:
        every = self._config.trainer.evaluate_every_steps
        return step == self._config.trainer.steps or (every is not None and step % every == 0)

    def _rewind(self, result: StepResult) -> None:
        """Go back to the checkpoint before a spike, and on behind the samples that led to it."""
        spike, behind = self._progress.step, self._progress.next_sample
        with self._saved_before_its_end():
            self._divergence.count_rewind(result)
        rewinds = self._progress.rewinds
        if self._go_back(before=spike) is None:
            raise CheckpointError(
                f"step {spike}: the loss spiked to {result.loss:.4g}, and there is no checkpoint "
                "before it to go back to; a smaller checkpoint.every_steps saves sooner"
            )
        self._progress.next_sample, self._progress.rewinds = behind, rewinds
        self._parts.checkpoints.replace(self._progress.step)
        self._reporter.rewound(spike, result.loss)

    def _go_back(self, before: int | None) -> Resumed | None:
        """Load the newest checkpoint (before a step), and all that was saved with it."""
        self._parts.checkpoints.settle()
        resumed = self._parts.restorer.restore(before)
        if resumed is not None:
            self._progress.load_meta(resumed.meta["progress"])
            self._parts.step.loss_scale.load_meta(resumed.meta["loss_scale"])
            self._parts.checkpoints.saved_step = self._progress.step
        return resumed

    def _finish(self, stopped: bool) -> None:
        """See the last checkpoint committed, let the model speak and write the report.

        Raises:
            StopRequested: the run was asked to stop before its end.
        """
        parts, trainer = self._parts, self._config.trainer
        self._tracer.close()
        if stopped:
            parts.checkpoints.save(self._progress.step)
        parts.checkpoints.settle()
        texts: list[str] = []
        if trainer.sample_tokens and not stopped:
            texts = parts.sampler.continue_texts(
                trainer.sample_prompts, trainer.sample_tokens, temperature=0.8, seed=trainer.seed
            )
        self._reporter.finish(texts, stopped)
        if stopped:
            raise StopRequested(self._farewell())

    def _farewell(self) -> str:
        reason = self._parts.stop.reason or "another rank was asked to stop"
        saved = (
            "nothing is saved (checkpoint=off)"
            if self._config.checkpoint.mode == "off"
            else f"it goes on from there with run.dir={self._config.run.dir}"
        )
        return f"stopped after step {self._progress.step} ({reason}); {saved}"
