"""Shows the progress of a run: a live line on a terminal, and a plain line every few steps."""

import rich

from frontier_llm.telemetry.metrics import Sink
from frontier_llm.telemetry.progress_lines import ProgressLines
from frontier_llm.telemetry.trackers import BestEffort
from frontier_llm.trainer.callbacks.sink_callback import SinkCallback


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
