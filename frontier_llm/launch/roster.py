"""Which processes hold the ranks of a job: the rosters, and the keys by which processes meet.

A job whose ranks can be replaced goes through generations. In a generation each rank is held by one
process, called a member. When a member dies, the next generation begins: another process takes its
rank, all others keep theirs. The launcher publishes a roster for each generation in a key-value
store, which a process of its own holds, so that any rank may die.

Keys of generation G, all below `members/`:

- `roster/G`: the roster as JSON.
- `arrived/G/R`: set when the member of rank R has read the roster.
- `seen/G/N`: set when a thread of member N has read the roster, whatever its main thread does.
- `arrivals/G`: number of members that have read it.
- `lost/G`: set when a member has lost contact with another one.
- `late/G`: ranks that a watchdog found to be late, as JSON.
- `done/G`: number of members that have finished their work.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


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


def seen_key(generation: int, number: int) -> str:
    """Return the key that says that a member knows of a generation."""
    return f"members/seen/{generation}/{number}"


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


def absent_ranks(store: "Store", generation: int, members: Sequence[int]) -> tuple[list[int], bool]:
    """Return the ranks whose members have not arrived, and whether their processes are stopped.

    A process is taken for stopped if not even its thread that waits for rosters has read this one.

    Args:
        store: the store of the rosters.
        generation: number of the generation.
        members: by rank, its member.
    """
    ranks = range(len(members))
    absent = [rank for rank in ranks if not store.check([arrived_key(generation, rank)])]
    seen = (store.check([seen_key(generation, members[rank])]) for rank in absent)
    return absent, not any(seen)
