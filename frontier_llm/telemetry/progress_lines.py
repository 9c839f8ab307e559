"""Show the progress of a run on the console.

On a terminal, a line at the bottom shows the last step (the "live line"). In addition, a line is
logged every `every_steps` steps.
"""

import logging
from collections import deque
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from frontier_llm.telemetry.metrics import StepMetrics
from frontier_llm.units import format_count, format_seconds

_LOG = logging.getLogger(__name__)
_AVERAGED_STEPS = 20
"""Number of latest steps whose mean duration is used to predict the remaining time."""
_BAR_WIDTH, _LEAST_BAR_WIDTH = 16, 4
"""Largest and smallest number of characters of the bar; in less space there is none."""
_BY_IMPORTANCE = ("loss", "validation", "tokens/s", "MFU", "norm", "lr", "z-loss", "TFLOP/s")
"""The fields of the live line after the step, the bar and the ETA. Those that do not fit on the
terminal are left out, the last ones first."""


class ProgressLines:
    """A sink that shows the metrics of steps.

    The logged lines go through the package's log, so that run.log contains them too.
    """

    def __init__(self, total_steps: int, every_steps: int, console: Console, *, live: bool) -> None:
        self._total_steps, self._every_steps = total_steps, every_steps
        self._seconds: deque[float] = deque(maxlen=_AVERAGED_STEPS)
        self._line = LiveLine(total_steps)
        # rich's thread, which draws the line, competes with training for a core
        self._live = Live(self._line, console=console, refresh_per_second=2, transient=True)
        if live:
            self._live.start()

    def write(self, metrics: StepMetrics) -> None:
        """Show a step."""
        self._seconds.append(metrics.step_seconds)
        fields = _format_fields(metrics)
        mean_seconds = sum(self._seconds) / len(self._seconds)
        remaining = (self._total_steps - metrics.step) * mean_seconds
        self._line.show(metrics.step, remaining, fields)
        text = list(fields.values())
        if metrics.step < self._total_steps:
            text.append(f"ETA {format_seconds(remaining)}")
        line = f"step {metrics.step}/{self._total_steps}  " + "  ".join(text)
        is_first_or_last = metrics.step in (1, self._total_steps)
        is_due = is_first_or_last or metrics.step % self._every_steps == 0
        if metrics.skipped:
            _LOG.warning("%s  (not finite: update skipped)", line)
        elif is_due or metrics.validation_loss is not None:
            _LOG.info("%s", line)

    def close(self) -> None:
        """Remove the live line."""
        self._live.stop()


class LiveLine:
    """One line about the last step, with as many fields as the terminal has room for.

    The step and the ETA come before everything else. Fields that no longer change keep their
    place, because each is as wide as its longest text so far.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._step, self._eta = 0, "ETA unknown"
        self._fields: dict[str, str] = {}

    def show(self, step: int, remaining_seconds: float, fields: Mapping[str, str]) -> None:
        """Show a step. A field that it does not have, such as a validation loss, is kept."""
        self._step, self._eta = step, f"ETA {format_seconds(remaining_seconds)}"
        widths = {name: len(text) for name, text in self._fields.items()}
        new = {name: text.ljust(widths.get(name, 0)) for name, text in fields.items()}
        self._fields = self._fields | new  # replaced at once: another thread draws the line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = str(self._total_steps)
        step, eta = f"{self._step:>{len(total)}}/{total}", self._eta.ljust(len("ETA 99 min 59 s"))
        left = options.max_width - len(step) - len(eta) - 2
        bar = min(_BAR_WIDTH, left - 2)
        line = Text(step, no_wrap=True, overflow="crop", end="")
        if bar >= _LEAST_BAR_WIDTH:
            left -= bar + 2
            done = bar * min(self._step, self._total_steps) // self._total_steps
            full, empty = ("#", "-") if options.ascii_only else ("━", "─")
            line.append("  ").append(full * done, "bar.complete").append(empty * (bar - done))
        line.append(f"  {eta}")
        for name in _BY_IMPORTANCE:
            text = self._fields.get(name)
            if text is None:
                continue
            left -= len(text) + 2
            if left < 0:
                break
            line.append(f"  {text}")
        line.truncate(options.max_width)
        yield line


def _format_fields(metrics: StepMetrics) -> dict[str, str]:
    """Return the numbers of a step as text, such as `loss 2.3456`, in the order of a log line."""
    fields = {"loss": f"loss {metrics.loss:.4f}"}
    if metrics.z_loss is not None:
        fields["z-loss"] = f"z-loss {metrics.z_loss:.2e}"
    fields |= {
        "norm": f"norm {metrics.grad_norm:.2f}",
        "lr": f"lr {metrics.learning_rate:.2e}",
        "tokens/s": f"{format_count(metrics.tokens_per_second)} tokens/s",
        "TFLOP/s": f"{metrics.model_tflops_per_device:.3g} TFLOP/s per device",
    }
    if metrics.mfu is not None:
        fields["MFU"] = f"MFU {metrics.mfu:.1%}"
    if metrics.validation_loss is not None:
        fields["validation"] = f"validation {metrics.validation_loss:.4f}"
    if metrics.validation_bits_per_byte is not None:
        fields["bits"] = f"({metrics.validation_bits_per_byte:.3f} bits/byte)"
    return fields
