"""Writes the metrics of each step for TensorBoard."""

from pathlib import Path

from frontier_llm.telemetry.metrics import Sink
from frontier_llm.telemetry.trackers import BestEffort, TensorBoardSink
from frontier_llm.trainer.callbacks.sink_callback import SinkCallback


class TensorBoard(SinkCallback):
    """Writes event files on rank 0. A failure only turns this off. Runs no collectives."""

    def open_sink(self) -> Sink | None:
        """Open the event file, if `telemetry.tensorboard` is true."""
        config = self.context.config
        if not config.telemetry.tensorboard:
            return None
        return BestEffort("tensorboard", lambda: TensorBoardSink(Path(config.run.dir)))
