"""Which processes hold the ranks of a job: the rosters, and the keys by which processes meet.

A job whose ranks can be replaced goes through generations. In a generation each rank is held by one
process, called a member. When a member dies, the next generation begins: another process takes its
rank, all others keep theirs. The launcher publishes a roster for each generation in a key-value
store, which a process of its own holds, so that any rank may die.

Keys of generation G, all below `members/`:

- `roster/G`: the roster as JSON.
- `arrived/G/R`: set when the member of rank R has read the roster.
- `arrivals/G`: number of members that have read it.
- `lost/G`: set when a member has lost contact with another one.
- `late/G`: ranks that a watchdog found to be late, as JSON.
- `done/G`: number of members that have finished their work.
"""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Roster:
    """The members of one generation."""

    generation: int
    """Number of the generation, from 0."""
    members: tuple[int, ...] | None
    """The member of each rank; None = the job is over."""
    timeout_seconds: float = 0.0
    """Time limit of a collective with gloo. It grows if members lose contact and none has died."""

    former_size: int = 0
    """If ranks are missing, so that the members only save what they have in memory: the number of
    ranks before; else 0."""

    def to_json(self) -> str:
        """Return the roster as text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Roster":
        """Read the output of `to_json`."""
        values = json.loads(text)
        members = values["members"]
        return cls(**{**values, "members": None if members is None else tuple(members)})


def roster_key(generation: int) -> str:
    """Return the key of a roster."""
    return f"members/roster/{generation}"


def arrived_key(generation: int, rank: int) -> str:
    """Return the key that says that a rank's member has read the roster."""
    return f"members/arrived/{generation}/{rank}"


def arrivals_key(generation: int) -> str:
    """Return the key of the number of members that have read a roster."""
    return f"members/arrivals/{generation}"


def lost_key(generation: int) -> str:
    """Return the key that says that a member has lost contact."""
    return f"members/lost/{generation}"


def late_key(generation: int) -> str:
    """Return the key of the ranks that are late."""
    return f"members/late/{generation}"


def done_key(generation: int) -> str:
    """Return the key of the number of members that are done."""
    return f"members/done/{generation}"
