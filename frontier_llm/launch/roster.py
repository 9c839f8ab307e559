"""Which processes hold the ranks of a job.

A job whose ranks can be replaced goes through generations. In a generation each rank is held by one
process, called a member. When a member dies, the next generation begins: another process takes its
rank, all others keep theirs. The coordinator publishes a roster for each generation.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Roster:
    """The members of one generation."""

    generation: int
    members: tuple[int, ...] | None
    """The member of each rank; None = the job is over."""
    timeout_seconds: float = 0.0
    """Time limit of a collective with gloo. It grows if members lose contact and none has died."""

    former_size: int = 0
    """If ranks are missing, so that the members only save what they have in memory: the number of
    ranks before; else 0."""

    def to_json(self) -> str:
        """Return the roster as text, for the store.

        Neighbouring ranks usually have neighbouring members, so the text has one entry per run of
        these, and grows with the number of replacements and not of ranks.
        """
        runs = None if self.members is None else _runs(self.members)
        return json.dumps({**asdict(self), "members": runs})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Roster":
        """Read the output of `to_json`."""
        values = json.loads(text)
        runs = values["members"]
        if runs is not None:
            runs = tuple(number for first, count in runs for number in range(first, first + count))
        return cls(**{**values, "members": runs})


def _runs(members: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in members:
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
