"""A base class for callbacks that write the metrics of each step to one sink.

A sink is an object that records metrics, for example in a file (telemetry/metrics.py).
"""

from frontier_llm.telemetry.metrics import Sink
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext


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
