"""The sinks of a run, chosen by its configuration."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rich
from rich.console import Console

from frontier_llm.config.telemetry import TelemetryConfig
from frontier_llm.telemetry.console import ConsoleSink
from frontier_llm.telemetry.event_files import TensorBoardSink
from frontier_llm.telemetry.jsonl import JsonlSink
from frontier_llm.telemetry.metrics import Sink, StepMetrics
from frontier_llm.telemetry.weights_and_biases import WandbSink

_LOG = logging.getLogger(__name__)


class BestEffort:
    """A sink that a run can do without: its first failure is logged and turns it off."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._sink: Sink | None = None
        self._try(lambda: setattr(self, "_sink", make()))

    def write(self, metrics: StepMetrics) -> None:
        """Hand on a step, if the sink still works."""
        sink = self._sink
        if sink is not None:
            self._try(lambda: sink.write(metrics))

    def close(self) -> None:
        """Close the sink, if it still works."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._try(sink.close)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # foreign code: whatever it raises, the training goes on
            self._sink = None
            reason = (str(error).strip() or "no reason given").splitlines()
            _LOG.warning(
                "%s is off for the rest of this run: %s: %s",
                self._name,
                type(error).__name__,
                " ".join(line.strip() for line in reason[:3]),
            )


def make_sinks(
    config: TelemetryConfig,
    run_dir: Path,
    total_steps: int,
    run_config: Mapping[str, Any],
    console: Console | None = None,
) -> list[Sink]:
    """Open all sinks of a run; exactly one rank of a job calls this.

    Args:
        config: which of them are wanted.
        run_dir: exists; files are written below it.
        total_steps: of the whole run, for the progress line.
        run_config: resolved configuration, nested plain values.
        console: of the progress line; absent = rich's own, which the log uses too.

    Raises:
        TrainingError: metrics.jsonl cannot be opened. No other sink's failure is raised.
    """
    console = console or rich.get_console()
    live = config.progress and console.is_terminal
    every = config.console_every_steps
    sinks: list[Sink] = [
        JsonlSink(run_dir),
        BestEffort("the console", lambda: ConsoleSink(total_steps, every, console, live=live)),
    ]
    mode, project = config.wandb, config.wandb_project
    if mode != "off":
        sinks.append(BestEffort("wandb", lambda: WandbSink(mode, project, run_dir, run_config)))
    if config.tensorboard:
        sinks.append(BestEffort("tensorboard", lambda: TensorBoardSink(run_dir)))
    return sinks
