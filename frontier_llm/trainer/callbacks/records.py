"""Callbacks that record each step: in ledger.jsonl, in metrics.jsonl, on the console, in trackers.

A sink is an object that records metrics, for example in a file (telemetry/metrics.py).
"""

from pathlib import Path

import rich

from frontier_llm.telemetry import jsonl
from frontier_llm.telemetry.metrics import Sink
from frontier_llm.telemetry.progress_lines import ProgressLines
from frontier_llm.telemetry.trackers import BestEffort, TensorBoardSink, WandbSink
from frontier_llm.trainer.callbacks.callback import Callback, Rewind, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.ledger_file import LedgerFile
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.step_result import StepResult


class Ledger(Callback):
    """Writes ledger.jsonl on rank 0: the samples of each step, resumes, rewinds. No collectives."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._file = LedgerFile(Path(context.config.run.dir))
        self._is_writer = context.world.rank == 0
        self._recorded_step: int | None = None
        """A step that was recorded before ranks were replaced."""

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Record a resume, and what decides which samples are read."""
        if not self._is_writer:
            return
        step = self.context.progress.step
        if resumed is not None:
            self._file.event("resume", step, changes=resumed.changes)
        for event, segments in self.context.data.to_meta().items():
            if segments:
                self._file.event(event, step, segments=segments)

    def on_replacement(self, last_step: int) -> None:
        """Record that ranks were replaced, and remember the step that the ledger ends with."""
        if self._is_writer:
            self._recorded_step = self._file.last_step()
            self._file.event("replacement", self.context.progress.step)

    def on_update(self, step: int, first_sample: int, result: StepResult) -> None:
        """Record the samples of a step right after its update, before anything else can fail."""
        if self._is_writer and step != self._recorded_step:
            self._file.step(step, first_sample, result.samples, result.digest)

    def on_step_end(self, end: StepEnd) -> None:
        """Record that an update was skipped."""
        result = end.result
        if self._is_writer and result.skipped:
            facts = {"loss": str(result.loss), "norm": str(result.grad_norm)}
            self._file.event("skip", end.metrics.step, **facts)

    def close(self) -> None:
        """Log how many lines could not be written."""
        self._file.close()

    def on_rewind(self, rewind: Rewind) -> None:
        """Record a rewind."""
        if self._is_writer:
            self._file.event(
                "rewind",
                self.context.progress.step,
                spike=rewind.from_step,
                loss=rewind.loss,
                next_sample=self.context.progress.next_sample,
            )


class SinkCallback(Callback):
    """Writes to a sink on rank 0; other ranks do nothing. Runs no collectives."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._sink = self.open_sink() if context.world.rank == 0 else None

    def open_sink(self) -> Sink | None:
        """Open the sink; return None if the configuration turns it off. Rank 0 only."""
        raise NotImplementedError

    def on_step_end(self, end: StepEnd) -> None:
        """Write the metrics of the step."""
        if self._sink is not None:
            self._sink.write(end.metrics)

    def close(self) -> None:
        """Close the sink."""
        if self._sink is not None:
            self._sink.close()


class MetricsFile(SinkCallback):
    """Writes metrics.jsonl on rank 0. Runs no collectives.

    After a resume or a rewind it removes the lines of the steps that the run repeats.
    """

    _sink: jsonl.JsonlSink | None

    def open_sink(self) -> jsonl.JsonlSink:
        """Open the file; raise a TrainingError if this fails."""
        return jsonl.JsonlSink(Path(self.context.config.run.dir))

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Remove the lines after the step that the run continues from."""
        if resumed is not None:
            self._remove_later_lines()

    def on_replacement(self, last_step: int) -> None:
        """Remove the lines of steps that are recorded again."""
        if self._sink is not None:
            self._sink.cut(last_step)

    def on_rewind(self, rewind: Rewind) -> None:
        """Remove the lines after the step that the run went back to."""
        self._remove_later_lines()

    def on_stop(self, *, is_early: bool) -> None:
        """Close the file before the report reads it."""
        self.close()

    def _remove_later_lines(self) -> None:
        if self._sink is not None:
            self._sink.cut(self.context.progress.step)


class ProgressBar(SinkCallback):
    """Shows the progress on rank 0. A failure only turns it off. Runs no collectives."""

    def open_sink(self) -> Sink:
        """Return the sink that prints; it has a live line if the output is a terminal."""
        config, console = self.context.config, rich.get_console()  # the log prints there too
        live = config.telemetry.progress and console.is_terminal
        steps, every = config.trainer.steps, config.telemetry.console_every_steps
        return BestEffort("the console", lambda: ProgressLines(steps, every, console, live=live))

    def on_stop(self, *, is_early: bool) -> None:
        """Remove the live line before the last lines are printed."""
        self.close()


class WeightsAndBiases(SinkCallback):
    """Sends metrics on rank 0. A failure only turns this off. Runs no collectives."""

    def open_sink(self) -> Sink | None:
        """Start a wandb run, unless `telemetry.wandb` is off."""
        config = self.context.config
        mode, project = config.telemetry.wandb, config.telemetry.wandb_project
        if mode == "off":
            return None
        run_dir, values = Path(config.run.dir), config.model_dump(mode="json")
        return BestEffort("wandb", lambda: WandbSink(mode, project, run_dir, values))


class TensorBoard(SinkCallback):
    """Writes event files on rank 0. A failure only turns this off. Runs no collectives."""

    def open_sink(self) -> Sink | None:
        """Open the event file, if `telemetry.tensorboard` is true."""
        config = self.context.config
        if not config.telemetry.tensorboard:
            return None
        return BestEffort("tensorboard", lambda: TensorBoardSink(Path(config.run.dir)))
