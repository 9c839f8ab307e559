"""Writes the metrics of each step to the console, to metrics.jsonl and to trackers.

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
from frontier_llm.trainer.resume import Resumed


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
        """Open the file.

        Raises:
            TrainingError: it cannot be opened.
        """
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
