"""Callbacks that record each step: in ledger.jsonl, in metrics.jsonl, on the console, in trackers.

Only rank 0 has them, so they run no collectives.
"""

import logging
from pathlib import Path

import rich

from frontier_llm.saving.ledger_file import LedgerFile
from frontier_llm.saving.restorer import Resumed
from frontier_llm.saving.run_directory import recorded_steps
from frontier_llm.telemetry import jsonl
from frontier_llm.telemetry.progress_lines import ProgressLines
from frontier_llm.telemetry.trackers import BestEffort, TensorBoardSink, WandbSink
from frontier_llm.trainer.callbacks.callback import Callback, Rewind, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.step_result import StepResult

_LOG = logging.getLogger(__name__)


class Ledger(Callback):
    """Writes ledger.jsonl: the samples of each step, resumes, replacements, skips and rewinds."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._file = LedgerFile(Path(context.config.run.dir))
        self._recorded_step: int | None = None
        """A step that was recorded before ranks were replaced."""

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Record a resume, and what decides which samples are read."""
        step = self.context.progress.step
        if resumed is not None:
            self._file.event("resume", step, changes=resumed.changes)
        for event, segments in self.context.data.to_meta().items():
            if segments:
                self._file.event(event, step, segments=segments)

    def on_replacement(self, last_step: int) -> None:
        """Record that ranks were replaced, and remember the step that the ledger ends with."""
        self._recorded_step = self._file.last_step()
        self._file.event("replacement", self.context.progress.step)

    def on_update(self, step: int, first_sample: int, result: StepResult) -> None:
        """Record the samples of a step right after its update, before anything else can fail."""
        if step != self._recorded_step:
            self._file.step(step, first_sample, result.samples, result.digest)

    def on_step_end(self, end: StepEnd) -> None:
        """Record that an update was skipped."""
        result = end.result
        if result.skipped:
            facts = {"loss": str(result.loss), "norm": str(result.grad_norm)}
            self._file.event("skip", end.metrics.step, **facts)

    def on_rewind(self, rewind: Rewind) -> None:
        """Record a rewind."""
        self._file.event(
            "rewind",
            self.context.progress.step,
            spike=rewind.from_step,
            loss=rewind.loss,
            next_sample=self.context.progress.next_sample,
        )

    def close(self) -> None:
        """Log how many lines could not be written."""
        self._file.close()


class MetricsFile(Callback):
    """Writes metrics.jsonl. After a resume or a rewind it removes the lines of repeated steps."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._sink = jsonl.JsonlSink(Path(context.config.run.dir))

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Remove the lines after the step that the run continues from, and say which."""
        step, run_dir = self.context.progress.step, Path(self.context.config.run.dir)
        if resumed is None:
            return
        if (last := recorded_steps(run_dir)) > step:
            _LOG.info("again      steps %d to %d, which no checkpoint has", step + 1, last)
        self._sink.cut(step)

    def on_replacement(self, last_step: int) -> None:
        """Remove the lines of steps that are recorded again."""
        self._sink.cut(last_step)

    def on_step_end(self, end: StepEnd) -> None:
        """Write the metrics of the step."""
        self._sink.write(end.metrics)

    def on_rewind(self, rewind: Rewind) -> None:
        """Remove the lines after the step that the run went back to."""
        self._sink.cut(self.context.progress.step)

    def on_stop(self, *, is_early: bool) -> None:
        """Close the file before the report reads it."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._sink.close()


class ConsoleAndTrackers(Callback):
    """Shows metrics on the console and in trackers. A failure turns only that one off."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        config, console = context.config, rich.get_console()  # the log prints there too
        telemetry, run_dir, steps = config.telemetry, Path(config.run.dir), config.trainer.steps
        live, every = telemetry.progress and console.is_terminal, telemetry.console_every_steps
        self._console = BestEffort(
            "the console", lambda: ProgressLines(steps, every, console, live=live)
        )
        self._sinks = [self._console]
        if (mode := telemetry.wandb) != "off":
            project, values = telemetry.wandb_project, config.model_dump(mode="json")
            wandb = BestEffort("wandb", lambda: WandbSink(mode, project, run_dir, values))
            self._sinks.append(wandb)
        if telemetry.tensorboard:
            self._sinks.append(BestEffort("tensorboard", lambda: TensorBoardSink(run_dir)))

    def on_step_end(self, end: StepEnd) -> None:
        """Write the metrics of the step."""
        for sink in self._sinks:
            sink.write(end.metrics)

    def on_stop(self, *, is_early: bool) -> None:
        """Remove the live line before the last lines are printed."""
        self._console.close()

    def close(self) -> None:
        """Close all of them."""
        for sink in self._sinks:
            sink.close()
