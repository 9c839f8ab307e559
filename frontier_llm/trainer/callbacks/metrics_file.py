"""Writes metrics.jsonl, which has one line per step."""

from pathlib import Path

from frontier_llm.telemetry import jsonl
from frontier_llm.trainer.callbacks.callback import Rewind
from frontier_llm.trainer.callbacks.sink_callback import SinkCallback
from frontier_llm.trainer.resume import Resumed


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
