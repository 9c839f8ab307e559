"""A run that is started as often as needed, and a reference run that is not killed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.kills.forked_run import ForkedRun
from benchmarks.faults.kills.run_snapshot import Step, read_steps, take_snapshot
from frontier_llm.errors import TrainingError

PATIENCE_SECONDS = 60.0
"""How long a run may take until its first step starts."""
POLL_SECONDS = 0.02
"""Interval at which the run directory is read."""
_LOG_LINES = 12
"""Number of lines of output that an error message quotes."""


@dataclass(frozen=True)
class Program:
    """The training program and its configuration."""

    train: Callable[[Sequence[str]], int]
    """Trains with the given overrides; all modules are imported already."""
    overrides: tuple[str, ...]
    """Command line without the run directory."""
    last_step: int
    """Last step of a run."""


class RestartedRun:
    """A run directory, and the starts of the run in it."""

    def __init__(self, program: Program, run_dir: Path) -> None:
        self._program, self.run_dir = program, run_dir
        self._log = run_dir.with_suffix(".log")

    def start(self) -> ForkedRun:
        """Start the processes of the run."""
        overrides = (*self._program.overrides, f"run.dir={self.run_dir}")
        return ForkedRun(self._program.train, overrides, self._log)

    def wait_for_step(self, processes: ForkedRun, steps_before: int) -> None:
        """Wait until a step has started, the run has ended, or PATIENCE_SECONDS have passed.

        Args:
            processes: the processes of the run.
            steps_before: number of steps that had been started before.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while processes.exit_code() is None and time.monotonic() < deadline:
            if take_snapshot(self.run_dir).steps_started > steps_before:
                return
            time.sleep(POLL_SECONDS)

    def log_tail(self) -> str:
        """Return the last lines of the run's output."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-_LOG_LINES:])


@dataclass(frozen=True)
class ReferenceRun:
    """The steps and times of a run that is not killed."""

    steps: dict[int, Step]
    """Loss and gradient norm of each step."""
    start_seconds: float
    """Time until the first step started."""
    step_seconds: float
    """Mean time per step."""

    @classmethod
    def measure(cls, program: Program, run_dir: Path) -> "ReferenceRun":
        """Run the program to its end.

        Raises:
            TrainingError: the run failed; the message has the last lines of its output.
        """
        run = RestartedRun(program, run_dir)
        processes, begin = run.start(), time.monotonic()
        try:
            run.wait_for_step(processes, 0)
            first_step = time.monotonic()
            processes.wait_for_end()
        finally:
            processes.end()
        if processes.exit_code():
            raise TrainingError(f"the reference run failed:\n{run.log_tail()}")
        step_seconds = (time.monotonic() - first_step) / program.last_step
        return cls(read_steps(run_dir), first_step - begin, step_seconds)
