"""A run that is started as often as it takes, and one that nobody has touched."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.errors import TrainingError
from tools.kills.evidence import Step, look, steps
from tools.kills.victim import Victim

PATIENCE_SECONDS = 60.0
"""For a run to begin its first step."""
LOOK_SECONDS = 0.02
_LOG_LINES = 12


@dataclass(frozen=True)
class Program:
    """What is run."""

    train: Callable[[Sequence[str]], int]
    """train.main, imported beforehand with all that it needs."""
    overrides: tuple[str, ...]
    """All but the run directory."""
    last_step: int


class Life:
    """A run in its directory, started as often as it takes."""

    def __init__(self, program: Program, run_dir: Path) -> None:
        self._program, self.run_dir = program, run_dir
        self._log = run_dir.with_suffix(".log")

    def start(self) -> Victim:
        """Start its processes."""
        overrides = (*self._program.overrides, f"run.dir={self.run_dir}")
        return Victim(self._program.train, overrides, self._log)

    def await_step(self, victim: Victim, steps_before: int) -> None:
        """Wait until a step has begun, or the run has ended, or the patience."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while victim.exit_code() is None and time.monotonic() < deadline:
            if look(self.run_dir).steps_read > steps_before:
                return
            time.sleep(LOOK_SECONDS)

    def last_words(self) -> str:
        """Return the end of what it has printed."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-_LOG_LINES:])


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody has touched."""

    steps: dict[int, Step]
    start_seconds: float
    """Until its first step began."""
    step_seconds: float

    @classmethod
    def measure(cls, program: Program, run_dir: Path) -> "Undisturbed":
        """Run it.

        Raises:
            TrainingError: it failed; with the end of what it printed.
        """
        life = Life(program, run_dir)
        victim, begin = life.start(), time.monotonic()
        try:
            life.await_step(victim, 0)
            first = time.monotonic()
            victim.wait_for_end()
        finally:
            victim.end()
        if victim.exit_code():
            raise TrainingError(f"the undisturbed run failed:\n{life.last_words()}")
        seconds = (time.monotonic() - first) / program.last_step
        return cls(steps(run_dir), first - begin, seconds)
