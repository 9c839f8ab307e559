"""A trace of a few steps: what ran on the host and on the device, and when.

One rank of each stage is traced, its first: the others do the same work. Each writes a file that
Perfetto (ui.perfetto.dev) and chrome://tracing open. torch's profiler makes it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from torch.profiler import profile, record_function

from frontier_llm.config.run import RunConfig
from frontier_llm.parallel.groups import Groups
from frontier_llm.sharding.sharded_states import ShardedStates

FOLDER = "traces"
"""In the run directory."""
_LOG = logging.getLogger(__name__)


class Tracer:
    """Traces the steps that the configuration names; every rank has one and calls it alike."""

    def __init__(self, config: RunConfig, groups: Groups, states: ShardedStates) -> None:
        first, count = config.telemetry.trace_from_step, config.telemetry.trace_steps
        self._steps = range(0) if first is None else range(first, first + count)
        self._folder = Path(config.run.dir) / FOLDER
        self._rank, self._states = groups.rank, states
        self._writes = groups.at.tensor == 0 and groups.at.data == 0
        self._traced: list[int] = []
        self._profile: profile | None = None
        self._writing: Thread | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Make a step inside the trace, if it is one of those.

        Collective over all ranks in the last of them.
        """
        if step not in self._steps:
            yield
            return
        if self._writes and self._profile is None:
            self._profile = profile()  # all that this torch can see
            self._profile.start()
        self._traced.append(step)
        with record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self._end()

    def close(self) -> None:
        """End a trace that is not complete, and see all of it written.

        Collective over all ranks, if there is one.
        """
        self._end()
        if self._writing is not None:
            self._writing.join()

    def _end(self) -> None:
        """Stop, and write the trace in a thread: the other ranks wait for this one's next step.

        Nothing that is being sent may outlive the profiler, which lends gloo's messages the memory
        for their names.
        """
        if not self._traced:
            return
        steps, self._traced = self._traced, []
        self._states.drain()
        if self._profile is None:
            return
        finished, self._profile = self._profile, None
        finished.stop()
        file = self._folder / f"steps_{steps[0]}_to_{steps[-1]}_rank_{self._rank}.json.gz"
        self._writing = Thread(target=_write, args=(finished, file), name="trace", daemon=True)
        self._writing.start()


def _write(finished: profile, file: Path) -> None:
    """Write a trace; a disk that is full stops no run."""
    try:
        file.parent.mkdir(exist_ok=True)
        finished.export_chrome_trace(str(file))
    except OSError as error:
        _LOG.warning("no trace: %s", error)
    else:
        _LOG.info("trace      %s (open it at ui.perfetto.dev)", file)
