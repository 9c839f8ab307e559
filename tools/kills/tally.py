"""What a loop of kills amounts to."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table

from tools.kills.evidence import PHASES, Phase, Scene, Step
from tools.kills.victim import TARGETS, Target


@dataclass(frozen=True)
class Kill:
    """One kill, and what was seen just before it."""

    target: Target
    phase: Phase
    committed: int | None
    """Newest step whose checkpoint was there."""
    seconds_to_end: float | None
    """Until none of the run's processes was left; None: some had to be killed one by one."""


@dataclass
class Tally:
    """All kills, and everything that should not have been."""

    kills: list[Kill] = field(default_factory=list)
    resumes: int = 0
    """How often a run went on from a checkpoint."""
    new_starts: int = 0
    """How often one began: nothing had been committed, or the one before was complete."""
    completed: int = 0
    """Runs that came to their last step."""
    compared: set[tuple[str, int]] = field(default_factory=set)
    """Runs and steps whose losses were compared with the undisturbed run's, after every kill."""
    lost: list[str] = field(default_factory=list)
    """Checkpoints that were committed, and from which the run did not go on."""
    wrong: list[str] = field(default_factory=list)
    """Losses or gradient norms that are not, to the bit, those of the undisturbed run."""
    failed: list[str] = field(default_factory=list)
    """Runs that neither went on nor said why as they should, or did not end."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, wrong or stuck."""
        return not (self.lost or self.wrong or self.failed)

    @property
    def longest_seconds(self) -> float:
        """From a kill to the end of all processes of the run; of those that ended."""
        return max(
            (k.seconds_to_end for k in self.kills if k.seconds_to_end is not None), default=0
        )

    def compare(self, run: str, found: dict[int, Step], expected: dict[int, Step]) -> None:
        """Hold what a run has written against an undisturbed one."""
        self.compared |= {(run, step) for step in found}
        for step, values in found.items():
            if values != expected.get(step):
                self.wrong.append(f"{run}, step {step}: {values} and not {expected.get(step)}")

    def follow(self, run: str, before: Scene, after: Scene) -> None:
        """Count resumes since a moment; each must be from what was committed then, or later."""
        for step in after.resumes[len(before.resumes) :]:
            self.resumes += 1
            if before.committed is not None and step < before.committed:
                self.lost.append(f"{run}: step {before.committed} was there, went on from {step}")
        newest = -1 if after.committed is None else after.committed
        if before.committed is not None and newest < before.committed:
            self.lost.append(f"{run}: step {before.committed} was there, {after.committed} is")

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            **asdict(self),
            "compared": len(self.compared),
            "longest_seconds": self.longest_seconds,
            "by_phase": Counter(kill.phase for kill in self.kills),
            "by_target": Counter(kill.target for kill in self.kills),
        }

    def to_table(self) -> Table:
        """Lay the kills out by phase and target."""
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
        """Say what came of it."""
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
