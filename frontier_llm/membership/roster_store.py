"""Which processes hold the ranks of a job, and the store in which these meet the coordinator.

A job whose ranks can be replaced goes through generations. In a generation each rank is held by one
process, called a member. When a member dies, the next generation begins: another process takes its
rank, all others keep theirs. The coordinator publishes a roster for each generation.

No process of a rank holds the store, so that any rank may die. On one machine a process of its own
holds it, and in a Slurm job the agent of task 0. Keys of generation G, all below `members/`:

- `roster/G`: the roster as JSON.
- `arrived/G/R`: set when the member of rank R has read the roster.
- `seen/G/N`: set when a thread of member N has read the roster, whatever its main thread does.
- `arrivals/G`: number of members that have read it.
- `suspicion/G`: set as soon as a member has an error that may come from the loss of another one.
- `lost/G`: set when a member has such an error, and no newer roster is published for some time.
- `late/G`: ranks that a watchdog found to be late, as JSON.
- `done/G`: number of members that have finished their work.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from frontier_llm.launch.coordination import FOREVER

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


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


@dataclass(frozen=True)
class LateRanks:
    """What a watchdog has found."""

    ranks: Sequence[int]
    """Ranks that hang or are slow; empty if all ranks wait in the same place."""
    diagnosis: str
    elsewhere: bool = False
    """Whether the device is at fault, so that only a process that waits, usually on another node,
    may take the place."""


class RosterStore:
    """The view of the coordinator or of a member.

    A thread that waits blocks the connection for all others. Several threads may therefore use an
    object only if none of them waits. Methods raise RuntimeError if the store is gone.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store

    def publish(self, roster: Roster) -> None:
        """Publish the roster of a generation, or the end of the job."""
        self._store.set(_key("roster", roster.generation), roster.to_json())

    def wait_for(self, generation: int) -> Roster:
        """Wait until the roster of a generation is published, and return it."""
        self.wait_until_published(generation)
        return Roster.from_json(self._store.get(_key("roster", generation)))

    def wait_until_published(self, generation: int) -> None:
        """Wait until the roster of a generation is published, without reading it."""
        self._store.wait([_key("roster", generation)], FOREVER)

    def report_seen(self, generation: int, number: int) -> None:
        """Report that the process of a member runs and knows of a generation."""
        self._store.set(_key("seen", generation, number), "")

    def report_arrival(self, generation: int, rank: int) -> None:
        """Report that the main thread of a rank's member has come to a generation."""
        self._store.set(_key("arrived", generation, rank), "")
        self._store.add(_key("arrivals", generation), 1)

    def report_suspicion(self, generation: int) -> None:
        """Report an error that may come from the loss of a member, whose node then is silent."""
        self._store.set(_key("suspicion", generation), "")

    def is_suspicious(self, generation: int) -> bool:
        """Return whether a member suspects that another one is lost."""
        return bool(self._store.check([_key("suspicion", generation)]))

    def report_lost_contact(self, generation: int, rank: int | None) -> None:
        """Report that a member has lost contact with another one."""
        self._store.set(_key("lost", generation), str(rank))

    def report_late(self, generation: int, late: LateRanks) -> None:
        """Report what a watchdog has found."""
        self._store.set(_key("late", generation), json.dumps(asdict(late)))

    def report_done(self, generation: int) -> None:
        """Report that a member has done its work."""
        self._store.add(_key("done", generation), 1)

    def count_done(self, generation: int) -> int:
        """Return how many members have done their work."""
        return int(self._store.add(_key("done", generation), 0))

    def has_lost_contact(self, generation: int) -> bool:
        """Return whether a member has reported a loss of contact."""
        return bool(self._store.check([_key("lost", generation)]))

    def take_late(self, generation: int) -> LateRanks | None:
        """Return what a watchdog has reported since the last call."""
        key = _key("late", generation)
        if not self._store.check([key]):
            return None
        late = LateRanks(**json.loads(self._store.get(key)))
        self._store.delete_key(key)
        return late

    def count_arrivals(self, generation: int) -> int:
        """Return how many members have come to a generation."""
        return int(self._store.add(_key("arrivals", generation), 0))

    def absent_ranks(self, generation: int, members: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ranks whose members have not come: those that run, and those that are stopped.

        A process is taken for stopped if not even its thread that waits for rosters has read this
        one. `members` has the member of each rank.
        """
        check = self._store.check
        slow: list[int] = []
        stopped: list[int] = []
        for rank, number in enumerate(members):
            if not check([_key("arrived", generation, rank)]):
                is_seen = check([_key("seen", generation, number)])
                (slow if is_seen else stopped).append(rank)
        return slow, stopped


def _key(name: str, *numbers: int) -> str:
    return "/".join(["members", name, *map(str, numbers)])
