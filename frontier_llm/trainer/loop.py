"""The training loop: resume, then train, evaluate and save step by step."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from frontier_llm.errors import StopRequested
from frontier_llm.launch.stop import stop_message
from frontier_llm.trainer import resume
from frontier_llm.trainer.callbacks.callback import Callback, Rewind, StepEnd
from frontier_llm.trainer.callbacks.callback_list import CallbackList
from frontier_llm.trainer.context import Continuation, TrainerContext
from frontier_llm.trainer.evaluate import Validation
from frontier_llm.trainer.learning_rate import LearningRate
from frontier_llm.trainer.step_result import StepFlags, StepResult


class Loop:
    """Trains, evaluates and saves. All ranks run the same loop at the same time.

    Callbacks do everything else, such as writing metrics. The loop calls them at fixed moments,
    which trainer/callbacks/callback.py lists. They do not learn of an error that this process
    `outlives`, because it continues in a new loop.

    `ended` is the last step whose metrics are recorded and whose checkpoint, if due, is begun.
    `unjudged` are the counters of the run after the last step, before callbacks saw the step.
    """

    def __init__(
        self,
        context: TrainerContext,
        callbacks: CallbackList,
        outlives: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        self._context, self._callbacks, self._outlives = context, callbacks, outlives
        self._config, self._progress = context.config, context.progress
        self._checkpoints, self._watchdog = context.checkpoints, context.control.watchdog
        self._learning_rate = LearningRate.of(context.config)
        self.ended = 0
        self.unjudged: Mapping[str, Any] | None = None
        self._seconds_between = 0.0
        """Seconds of saving or rewinding after the last metrics: they count in the next step."""
        self._call = callbacks.call
        self._checkpoints.on_begin = lambda step: self._call(Callback.on_checkpoint_begin, step)
        self._checkpoints.on_committed = lambda saved: self._call(
            Callback.on_checkpoint_committed, saved
        )

    def run(self, continuation: Continuation | None = None) -> None:
        """Train to the last step, or until a stop is requested, which raises a StopRequested.

        If ranks were replaced and the states are in memory, training goes on at a `continuation`.
        Raises a CheckpointError if a checkpoint cannot be written, or none can be resumed from, and
        a TrainingError if the run has diverged, or samples were lost.
        """
        data, ending = self._context.data, self._callbacks.ending(self._outlives)
        with ending, closing(data.train), closing(data.validation):
            stopped = self._continue(continuation) if continuation else self._start()
            while self._steps_remain and not stopped:
                step = self._progress.step + 1
                with self._watchdog.phase("step", step):
                    stopped = self._step(step)
            with self._watchdog.phase("closing"):
                self._finish(is_early=stopped and self._steps_remain)

    def _start(self) -> bool:
        resumed = resume.start(self._context)
        self._call(Callback.on_start, self._context.evaluation.run().loss, resumed)
        self.ended = self._progress.step
        return False

    def _continue(self, continuation: Continuation) -> bool:
        """End the last step again if a rank has not ended it; return whether to stop."""
        context, step, self.ended = self._context, continuation.step, continuation.ended
        self._call(Callback.on_replacement, self.ended)
        assert context.train_step.sums is not None
        result = context.train_step.result(context.train_step.sums).without_checkpoint_news()
        if result.stop:
            context.control.stop.look()  # for the reason, if it is still known
        self.unjudged = self._progress.to_meta()
        if self.ended < step:
            self._end_step(result, self._learning_rate(step), time.perf_counter())
        if continuation.saves:
            with self._watchdog.phase("checkpoint"):
                self._checkpoints.save(step)
        elif not self._steps_remain:
            self._checkpoints.saved_step = step  # the run directory has the last step
        return result.stop

    @property
    def _steps_remain(self) -> bool:
        return self._progress.step < self._config.trainer.steps

    def _step(self, step: int) -> bool:
        """Run one step, then evaluate and save if due; return whether a stop was requested."""
        context, control = self._context, self._context.control
        self._call(Callback.on_step_begin, step)
        start = time.perf_counter()
        learning_rate = self._learning_rate(step)
        samples = context.data.train.read_step(self._progress.next_sample)
        result = context.train_step.run(
            step,
            samples.micro_batches,
            learning_rate,
            lambda: StepFlags(control.stop.look(), samples.digest, self._checkpoints.state()),
            # a step that is saved sends its parameters in full, so that a resume repeats the run
            will_be_saved=self._checkpoints.is_due(step),
        )
        length, alone = context.model.layout.lengths, self._config.optimizer.cross_attention_steps
        self._progress.advance(result.samples, length.total, skipped=result.skipped, alone=alone)
        self.unjudged = self._progress.to_meta()
        return self._end_step(result, learning_rate, start)

    def _end_step(self, result: StepResult, learning_rate: float, start: float) -> bool:
        """Record a step that began at `start`, evaluate and save; return whether to stop."""
        step, checkpoints = self._progress.step, self._checkpoints
        self._call(Callback.on_update, step, self._progress.next_sample - result.samples, result)
        if result.saving.failed:
            with self._watchdog.phase("checkpoint"):
                # another rank may have reported it: wait until this rank has the error, too
                checkpoints.handle_failure()
        elif result.saving.committed:
            checkpoints.announce_commit()
        seconds = time.perf_counter() - start + self._seconds_between
        validation = self._evaluate(step)
        metrics = self._context.meter.measure(result, learning_rate, seconds, validation)
        end = StepEnd(result, metrics)
        self._call(Callback.on_step_end, end)
        # callbacks record the step before it is saved: every saved step has a line in metrics.jsonl
        start = time.perf_counter()
        if end.rewind_reason:  # a callback has set it in `on_step_end`, on all ranks
            with self._watchdog.phase("rewind"):
                resume.rewind(self._context, end.rewind_reason)
                self._call(Callback.on_rewind, Rewind(step, end.result.loss, end.rewind_reason))
        else:
            with self._watchdog.phase("checkpoint"):
                last = result.stop or not self._steps_remain
                checkpoints.after_step(step, last=last, saving=result.saving)
        self._seconds_between = time.perf_counter() - start
        self.ended = self._progress.step
        return result.stop

    def _evaluate(self, step: int) -> Validation | None:
        trainer = self._config.trainer
        every = trainer.evaluate_every_steps
        if step != trainer.steps and (every is None or step % every):
            return None
        with self._watchdog.phase("evaluation"):
            validation = self._context.evaluation.run()
        self._call(Callback.on_evaluation, step, validation.loss)
        return validation

    def _finish(self, *, is_early: bool) -> None:
        """Wait until the last checkpoint is committed, then let the callbacks finish."""
        control, config, step = self._context.control, self._config, self._progress.step
        if is_early:  # unless the step has been saved already
            self._checkpoints.save(step)
        self._checkpoints.end(step)
        control.stop.withdraw()
        self._call(Callback.on_stop, is_early=is_early)
        self._checkpoints.tiers.archive.wait()  # on rank 0: no collective may follow
        if is_early:
            is_saved = config.checkpoint.mode != "off"
            raise StopRequested(stop_message(step, control.stop.reason, config.run.dir, is_saved))
