"""The training loop: resume, then train, evaluate and save step by step."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from frontier_llm.errors import CheckpointError, StopRequested
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.launch.stop import stop_message
from frontier_llm.trainer.agreement import Continuation
from frontier_llm.trainer.callbacks.callback import Rewind, StepEnd
from frontier_llm.trainer.callbacks.callback_list import CallbackList
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.evaluate import Validation
from frontier_llm.trainer.learning_rate import LearningRate
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.step_result import StepFlags, StepResult


class Loop:
    """Trains, evaluates and saves. All ranks run the same loop at the same time.

    Callbacks do everything else, such as writing metrics. The loop calls them at fixed moments,
    which trainer/callbacks/callback.py lists.

    Attributes:
        ended: the last step that has ended, with its metrics and the begin of its checkpoint.
        unjudged: the counters of the run after the last step, before callbacks saw the step.
    """

    def __init__(
        self,
        context: TrainerContext,
        callbacks: CallbackList,
        outlives: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        """Initialise without running anything.

        Args:
            context: the objects of this rank.
            callbacks: what else is done at fixed moments.
            outlives: whether this process continues in a new loop after an error. Callbacks do not
                learn of such an error.
        """
        self._outlives, self.ended = outlives, 0
        self.unjudged: Mapping[str, Any] | None = None
        self._context, self._callbacks = context, callbacks
        self._config, self._progress = context.config, context.progress
        self._watchdog = context.control.watchdog
        self._learning_rate = LearningRate.of(context.config)
        length = self._config.data.sequence_length
        self._tokens_per_sample = sample_lengths(self._config.model, length).total
        self._seconds_between = 0.0
        """Seconds that the last step has spent on saving or rewinding after its metrics were made.
        They are added to the time of the next step."""
        context.checkpoints.listener = callbacks

    def __enter__(self) -> "Loop":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.data.train.close()
        self._context.data.validation.close()
        try:
            if error is not None and not self._outlives(error):
                self._callbacks.on_error(error)
        finally:
            self._callbacks.close()

    def run(self, continuation: Continuation | None = None) -> None:
        """Train to the last step, or until a stop is requested.

        Args:
            continuation: where training continues if ranks were replaced and the states are in
                memory; None = it starts, or resumes from a checkpoint.

        Raises:
            StopRequested: the run was asked to stop; the states are saved.
            CheckpointError: a checkpoint cannot be written, or none can be resumed from.
            TrainingError: the run has diverged, or samples were lost.
        """
        stopped = False
        if continuation is None:
            self._start()
        else:
            self.ended = continuation.ended
            stopped = self._continue(continuation)
        while self._steps_remain and not stopped:
            step = self._progress.step + 1
            with self._watchdog.phase("step", step):
                stopped = self._step(step)
        with self._watchdog.phase("closing"):
            self._finish(is_early=stopped and self._steps_remain)

    def _start(self) -> None:
        """Load a checkpoint or initial weights, if there are any."""
        context, config = self._context, self._config
        resumed = self._resume()
        if resumed is None and config.run.init_from:
            context.restorer.load_initial_weights(Path(config.run.init_from))
        context.checkpoints.prepare()
        if resumed is not None and not resumed.is_rounded:
            if resumed.is_local:
                context.checkpoints.secure(resumed.step, resumed.meta)
            if resumed.is_joined:
                context.checkpoints.replace(resumed.step)
        self._callbacks.on_start(context.evaluation.run().loss, resumed)
        self.ended = self._progress.step

    def _continue(self, continuation: Continuation) -> bool:
        """End the last step again if a rank has not ended it; return whether to stop."""
        context, step = self._context, continuation.step
        self._callbacks.on_replacement(self.ended)
        assert context.train_step.sums is not None
        result = context.train_step.result(context.train_step.sums).without_checkpoint_news()
        if result.stop:
            context.control.stop.look()  # for the reason, if it is still known
        self.unjudged = self._progress.to_meta()
        if self.ended < step:
            self._end_step(result, self._learning_rate(step), time.perf_counter())
        if continuation.saves:
            with self._watchdog.phase("checkpoint"):
                context.checkpoints.save(step)
        elif not self._steps_remain:
            context.checkpoints.saved_step = step  # the run directory has the last step
        return result.stop

    @property
    def _steps_remain(self) -> bool:
        return self._progress.step < self._config.trainer.steps

    def _resume(self) -> Resumed | None:
        """Load the newest checkpoint of the run, if there is one and `run.resume` allows it."""
        if self._config.run.resume == "never":
            return None
        resumed = self._load_checkpoint(before=None)
        if resumed is not None:
            self._context.data.resume(resumed.meta, self._progress.next_sample)
        return resumed

    def _step(self, step: int) -> bool:
        """Run one step, then evaluate and save if due; return whether a stop was requested."""
        self._callbacks.on_step_begin(step)
        start = time.perf_counter()
        learning_rate = self._learning_rate(step)
        result = self._train(step, learning_rate)
        self._progress.advance(result.samples, self._tokens_per_sample, skipped=result.skipped)
        self.unjudged = self._progress.to_meta()
        return self._end_step(result, learning_rate, start)

    def _end_step(self, result: StepResult, learning_rate: float, start: float) -> bool:
        """Record a step after its update, evaluate and save; return whether to stop.

        Args:
            result: result of the step.
            learning_rate: learning rate of the step.
            start: when the step began, in seconds of the performance counter.
        """
        step = self._progress.step
        self._callbacks.on_update(step, self._progress.next_sample - result.samples, result)
        self._handle_checkpoint_outcome(result)
        seconds = time.perf_counter() - start + self._seconds_between
        validation = self._evaluate(step)
        metrics = self._context.meter.measure(result, learning_rate, seconds, validation)
        end = StepEnd(result, metrics)
        self._callbacks.on_step_end(end)
        # callbacks record the step before it is saved: every saved step has a line in metrics.jsonl
        start = time.perf_counter()
        if end.rewind_reason:  # a callback has set it in `on_step_end`, on all ranks
            with self._watchdog.phase("rewind"):
                self._rewind(end)
        else:
            with self._watchdog.phase("checkpoint"):
                last = result.stop or not self._steps_remain
                self._context.checkpoints.after_step(step, last=last, saving=result.saving)
        self._seconds_between = time.perf_counter() - start
        self.ended = self._progress.step
        return result.stop

    def _train(self, step: int, learning_rate: float) -> StepResult:
        """Read the samples of a step and update the model with them."""
        context = self._context
        samples = context.data.train.read_step(self._progress.next_sample)

        def flags() -> StepFlags:
            return StepFlags(
                stop=context.control.stop.look(),
                checkpoint_failed=context.checkpoints.failed,
                checkpoint_committed=context.checkpoints.has_unannounced_commit,
                saving=context.checkpoints.saving,
                digest=samples.digest,
            )

        # a step that is saved sends its parameters in full, so that a resume repeats the run
        will_be_saved = context.checkpoints.is_due(step)
        return context.train_step.run(
            step, samples.micro_batches, learning_rate, flags, will_be_saved=will_be_saved
        )

    def _handle_checkpoint_outcome(self, result: StepResult) -> None:
        """React if a rank has reported, in this step, a failed or a committed checkpoint."""
        if result.checkpoint_failed:
            with self._watchdog.phase("checkpoint"):
                # another rank may have reported it: wait until this rank has the error, too
                self._context.checkpoints.handle_failure()
        elif result.checkpoint_committed:
            self._context.checkpoints.announce_commit()

    def _evaluate(self, step: int) -> Validation | None:
        """Evaluate if this is due after this step."""
        every = self._config.trainer.evaluate_every_steps
        is_due = every is not None and step % every == 0
        if not is_due and step != self._config.trainer.steps:
            return None
        with self._watchdog.phase("evaluation"):
            validation = self._context.evaluation.run()
        self._callbacks.on_evaluation(step, validation.loss)
        return validation

    def _rewind(self, end: StepEnd) -> None:
        """Load the checkpoint before this step, and continue with the samples after this step."""
        progress, step = self._progress, self._progress.step
        next_sample, rewinds = progress.next_sample, progress.rewinds
        if self._load_checkpoint(before=step) is None:
            raise CheckpointError(
                f"step {step}: {end.rewind_reason}, and there is no checkpoint before it to go "
                "back to; a smaller checkpoint.every_steps saves sooner"
            )
        progress.next_sample, progress.rewinds = next_sample, rewinds
        # the loaded checkpoint has older counters, so a resume from it would not skip the samples
        self._context.checkpoints.replace(progress.step)
        self._callbacks.on_rewind(Rewind(step, end.result.loss, end.rewind_reason))

    def _load_checkpoint(self, before: int | None) -> Resumed | None:
        """Load states, counters and loss scale from the newest checkpoint.

        Args:
            before: load only a checkpoint of a step before this one; None = of any step.

        Returns:
            The checkpoint; None if there is none.
        """
        context = self._context
        context.checkpoints.finish()
        context.train_step.sums = None  # from here on the states are no longer those of a step
        resumed = context.restorer.restore(before)
        if resumed is not None:
            stored = resumed.meta["config"]["data"]["sequence_length"]
            length = sample_lengths(self._config.model, stored).total
            self._progress.load_meta(resumed.meta["progress"], length)
            context.train_step.loss_scale.load_meta(resumed.meta["loss_scale"])
            # rounded moments do not count as saved: if the run stops here, it saves the states
            saved_step = None if resumed.is_rounded else self._progress.step
            context.checkpoints.saved_step = saved_step
        return resumed

    def _finish(self, *, is_early: bool) -> None:
        """Wait until the last checkpoint is committed, then let the callbacks finish.

        Raises:
            StopRequested: the run was asked to stop before its last step.
        """
        context, step = self._context, self._progress.step
        if is_early:  # unless the step has been saved already
            context.checkpoints.save(step)
        context.checkpoints.end(step)
        context.control.stop.withdraw()
        self._callbacks.on_stop(is_early=is_early)
        context.checkpoints.wait_for_archive()
        if is_early:
            is_saved = self._config.checkpoint.mode != "off"
            reason = context.control.stop.reason
            raise StopRequested(stop_message(step, reason, self._config.run.dir, is_saved))
