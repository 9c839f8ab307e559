"""Traces a few steps with torch's profiler: what ran on the host and on the device, and when.

Only the first rank of each pipeline stage is traced, because the other ranks of the stage do the
same work. The files can be opened in Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

import logging
from pathlib import Path
from threading import Thread

from torch.profiler import profile, record_function

from frontier_llm.trainer.callbacks.callback import Callback
from frontier_llm.trainer.context import TrainerContext

FOLDER = "traces"
"""Folder of the traces in the run directory."""
_LOG = logging.getLogger(__name__)


class Tracer(Callback):
    """Traces `telemetry.trace_steps` steps, beginning with step `telemetry.trace_from_step`.

    The end of a trace is collective over all ranks, which wait for messages that are being sent.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        telemetry, groups = context.config.telemetry, context.groups
        first, count = telemetry.trace_from_step, telemetry.trace_steps
        self._steps = range(0) if first is None else range(first, first + count)
        self._is_traced = groups.coordinates.tensor == 0 and groups.coordinates.data == 0
        self._traced: list[int] = []
        self._profile: profile | None = None
        self._region: record_function | None = None
        self._writer: Thread | None = None

    def on_step_begin(self, step: int) -> None:
        """End the region of the previous step in the trace, and begin the region of this step.

        The region of a step thus contains its checkpoint.
        """
        self._end_region()
        if step not in self._steps:
            self._end_trace()
            return
        if self._is_traced and self._profile is None:
            self._profile = profile()  # records all that this build of torch supports
            self._profile.start()
        self._traced.append(step)
        self._region = record_function(f"step {step}")
        self._region.__enter__()

    def on_stop(self, *, is_early: bool) -> None:
        """End a trace that is not complete, and wait until it is written."""
        self._end_region()
        self._end_trace()
        if self._writer is not None:
            self._writer.join()

    def _end_region(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.__exit__(None, None, None)

    def _end_trace(self) -> None:
        """Stop the profiler, and write the trace in a thread, so that other ranks need not wait.

        Before, this rank waits for messages that are being sent, because gloo keeps their names in
        memory that belongs to the profiler.
        """
        if not self._traced:
            return
        steps, self._traced = self._traced, []
        self.context.states.reads.drain()
        finished, self._profile = self._profile, None
        if finished is None:
            return
        finished.stop()
        name = f"steps_{steps[0]}_to_{steps[-1]}_rank_{self.context.world.rank}.json.gz"
        file = Path(self.context.config.run.dir) / FOLDER / name
        self._writer = Thread(target=_write, args=(finished, file), name="trace", daemon=True)
        self._writer.start()


def _write(finished: profile, file: Path) -> None:
    """Write a trace; a failure is logged and does not stop the run."""
    try:
        file.parent.mkdir(exist_ok=True)
        finished.export_chrome_trace(str(file))
    except OSError as error:
        _LOG.warning("no trace: %s", error)
    else:
        _LOG.info("trace      %s (open it at ui.perfetto.dev)", file)
