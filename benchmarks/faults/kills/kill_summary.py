"""The result of a loop of kills."""

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
    phase: Phase
    committed: int | None
    """Step of the newest checkpoint; None if there was none."""
    seconds_to_end: float | None
    """Time until all processes of the run had ended; None if some had to be killed separately."""


@dataclass
class KillSummary:
    """All kills, and all errors that were found."""

    kills: list[Kill] = field(default_factory=list)
    resumes: int = 0
    """Number of times a run was resumed from a checkpoint."""
    new_starts: int = 0
    """Number of new runs: the run before was complete, or had no checkpoint."""
    completed: int = 0
    """Number of runs that reached their last step."""
    compared: set[tuple[str, int]] = field(default_factory=set)
    """Runs and steps whose losses were compared with the reference run."""
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
        """Longest time from a kill to the end of all processes of the run, if they ended."""
        return max(
            (k.seconds_to_end for k in self.kills if k.seconds_to_end is not None), default=0
        )

    def compare(self, run: str, found: dict[int, Step], expected: dict[int, Step]) -> None:
        """Compare the steps of a run with those of the reference run."""
        self.compared |= {(run, step) for step in found}
        for step, values in found.items():
            if values != expected.get(step):
                self.wrong.append(f"{run}, step {step}: {values} instead of {expected.get(step)}")

    def follow(self, run: str, before: RunSnapshot, after: RunSnapshot) -> None:
        """Count the resumes between two snapshots, and check the step from which each one started.

        A resume must start from the newest checkpoint of the first snapshot, or a later one.
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
        for title in (*TARGETS, "together"):
            table.add_column(title, justify="right")
        counts = Counter((kill.phase, kill.target) for kill in self.kills)
        for phase in PHASES:
            row = [counts[phase, target] for target in TARGETS]
            table.add_row(phase, *map(str, (*row, sum(row))))
        return table

    def to_text(self) -> str:
        """Return the result as a few lines of text."""
        found = [*self.lost, *self.wrong, *self.failed]
        return "\n".join(
            [
                f"{self.resumes} resumes, {self.new_starts} new starts, {self.completed} runs "
                f"completed, the losses of {len(self.compared)} steps compared",
                f"{len(self.lost)} lost commits, {len(self.wrong)} wrong losses, "
                f"{len(self.failed)} other failures",
                f"at most {self.longest_seconds:.1f} s from a kill to the end of all processes",
                *found[:20],
            ]
        )
