"""The result of kill_loop.py: all kills, and what was found wrong."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.faults.kills.forked_run import TARGETS, Target
from benchmarks.faults.kills.run_snapshot import PHASES, Phase, RunSnapshot, Step


@dataclass(frozen=True)
class Kill:
    """One kill, and the state of the run right before it."""

    target: Target
    """Which processes were killed."""
    phase: Phase
    """What the run was doing."""
    committed: int | None
    """Step of the newest checkpoint; None if there was none."""
    seconds_to_end: float | None
    """Time until all processes of the run had ended; None if they did not end by themselves."""


@dataclass
class KillSummary:
    """All kills, and all errors that were found."""

    kills: list[Kill] = field(default_factory=list)
    resumes: int = 0
    """Number of times a run was resumed from a checkpoint."""
    new_starts: int = 0
    """Number of new runs. A run is new if the run before was complete or had no checkpoint."""
    completed: int = 0
    """Number of runs that reached their last step."""
    compared: set[tuple[str, int]] = field(default_factory=set)
    """Pairs of run and step whose losses were compared with the reference run."""
    lost: list[str] = field(default_factory=list)
    """Messages about committed checkpoints from which the run was not resumed."""
    wrong: list[str] = field(default_factory=list)
    """Messages about losses or gradient norms that differ from the reference run in any bit."""
    failed: list[str] = field(default_factory=list)
    """Messages about runs that failed, or did not end."""

    @property
    def is_clean(self) -> bool:
        """Whether no error was found."""
        return not (self.lost or self.wrong or self.failed)

    @property
    def longest_seconds(self) -> float:
        """Longest time in seconds from a kill to the end of all processes of the run."""
        seconds = (kill.seconds_to_end for kill in self.kills)
        return max((value for value in seconds if value is not None), default=0)

    def compare(self, run: str, found: dict[int, Step], expected: dict[int, Step]) -> None:
        """Compare the steps of a run with those of the reference run.

        Args:
            run: name of the run.
            found: its steps.
            expected: the steps of the reference run.
        """
        self.compared |= {(run, step) for step in found}
        for step, values in found.items():
            if values != expected.get(step):
                self.wrong.append(f"{run}, step {step}: {values} instead of {expected.get(step)}")

    def follow(self, run: str, before: RunSnapshot, after: RunSnapshot) -> None:
        """Count the resumes between two snapshots of a run, and check from which step each started.

        A resume must start from the newest checkpoint of the first snapshot, or from a later one.

        Args:
            run: name of the run.
            before: the first snapshot.
            after: the second snapshot.
        """
        for step in after.resumes[len(before.resumes) :]:
            self.resumes += 1
            if before.committed is not None and step < before.committed:
                self.lost.append(f"{run}: step {before.committed} was saved, resumed from {step}")
        newest = after.committed
        if before.committed is not None and (newest is None or newest < before.committed):
            self.lost.append(
                f"{run}: step {before.committed} was saved, now the newest is {newest}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return {
            **asdict(self),
            "compared": len(self.compared),
            "longest_seconds": self.longest_seconds,
            "by_phase": Counter(kill.phase for kill in self.kills),
            "by_target": Counter(kill.target for kill in self.kills),
        }

    def to_table(self) -> Table:
        """Return a table of the kills by phase and target."""
        table = Table(title=f"{len(self.kills)} kills", title_justify="left", box=HORIZONTALS)
        table.add_column("when")
        for title in (*TARGETS, "total"):
            table.add_column(title, justify="right")
        counts = Counter((kill.phase, kill.target) for kill in self.kills)
        for phase in PHASES:
            row = [counts[phase, target] for target in TARGETS]
            table.add_row(phase, *map(str, (*row, sum(row))))
        return table

    def to_text(self) -> str:
        """Return the result as a few lines of text."""
        errors = [*self.lost, *self.wrong, *self.failed]
        return "\n".join(
            [
                f"{self.resumes} resumes, {self.new_starts} new starts, {self.completed} runs "
                f"completed, the losses of {len(self.compared)} steps compared",
                f"{len(self.lost)} lost commits, {len(self.wrong)} wrong losses, "
                f"{len(self.failed)} other failures",
                f"at most {self.longest_seconds:.1f} s from a kill to the end of all processes",
                *errors[:20],
            ]
        )
