"""Show the progress of a run on the console.

On a terminal, a progress bar at the bottom is updated after each step (the "live line"). In
addition, a line is logged every `every_steps` steps.
"""

import logging
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from frontier_llm.telemetry.metrics import StepMetrics
from frontier_llm.units import format_count, format_seconds

_LOG = logging.getLogger(__name__)
_AVERAGED_STEPS = 20
"""Number of latest steps whose mean duration is used to predict the remaining time."""


class ProgressLines:
    """A sink that shows the metrics of steps.

    The logged lines go through the package's log, so that run.log contains them too.
    """

    def __init__(self, total_steps: int, every_steps: int, console: Console, *, live: bool) -> None:
        """Show the live line.

        Args:
            total_steps: number of steps of the whole run.
            every_steps: number of steps from one logged line to the next.
            console: console on which the live line is shown.
            live: whether to show the live line.
        """
        self._total_steps, self._every_steps = total_steps, every_steps
        self._seconds: deque[float] = deque(maxlen=_AVERAGED_STEPS)
        self._progress = _start_progress(console, total_steps) if live else None

    def write(self, metrics: StepMetrics) -> None:
        """Show a step."""
        self._seconds.append(metrics.step_seconds)
        fields = _format_fields(metrics)
        if metrics.step < self._total_steps:
            fields.append(f"ETA {format_seconds(self._remaining_seconds(metrics.step))}")
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=metrics.step, status="  ".join(fields))
        line = f"step {metrics.step}/{self._total_steps}  " + "  ".join(fields)
        if metrics.skipped:
            _LOG.warning("%s  (not finite: update skipped)", line)
        elif self._is_logged(metrics):
            _LOG.info("%s", line)

    def close(self) -> None:
        """Remove the live line."""
        if self._progress is not None:
            self._progress.stop()

    def _is_logged(self, metrics: StepMetrics) -> bool:
        is_first_or_last = metrics.step in (1, self._total_steps)
        is_due = metrics.step % self._every_steps == 0
        return is_first_or_last or is_due or metrics.validation_loss is not None

    def _remaining_seconds(self, step: int) -> float:
        return (self._total_steps - step) * sum(self._seconds) / len(self._seconds)


def _start_progress(console: Console, total_steps: int) -> Progress:
    progress = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[status]}", markup=False),
        console=console,
        refresh_per_second=2,  # rich's thread competes with training for a core
        transient=True,
    )
    progress.add_task("train", total=total_steps, status="first step")
    progress.start()
    return progress


def _format_fields(metrics: StepMetrics) -> list[str]:
    """Return the numbers of a step as text, such as `loss 2.3456`."""
    fields = [
        f"loss {metrics.loss:.4f}",
        f"norm {metrics.grad_norm:.2f}",
        f"lr {metrics.learning_rate:.2e}",
        f"{format_count(metrics.tokens_per_second)} tokens/s",
        f"{metrics.model_tflops_per_device:.3g} TFLOP/s per device",
    ]
    if metrics.z_loss is not None:
        fields.insert(1, f"z-loss {metrics.z_loss:.2e}")
    if metrics.mfu is not None:
        fields.append(f"MFU {metrics.mfu:.1%}")
    if metrics.validation_loss is not None:
        fields.append(f"validation {metrics.validation_loss:.4f}")
    if metrics.validation_bits_per_byte is not None:
        fields.append(f"({metrics.validation_bits_per_byte:.3f} bits/byte)")
    return fields
