"""What the agents of a Slurm job and its coordinator tell each other, in the store of all tasks.

Keys, all below `agents/`:

- `event/T/K`: event K of task T as JSON, from 0: a process was started or has ended.
- `events`: number of events of all tasks. An agent writes an event before it counts it, so that a
  reader never waits for an event of an agent that has died in between.
- `beat/T`: number of heartbeats of task T.
- `kill/N`: set by the coordinator; the agent of process N kills it.
- `orders`: number of the keys `kill/N` and `over`. An agent reads those only if it has changed.
- `over`: exit code of the job, set at its end.
- `left/T`: set when the agent of task T has read the exit code, and no longer needs the store.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class Event:
    """The start or the end of a process."""

    number: int
    code: int | None = None
    """Exit code, or the negative number of the signal; None = the process was started."""
    seconds: float = 0.0
    """If it has ended: when, in seconds since 1970."""
    host: str = ""
    """If it was started: its host."""
    pid: int = 0
    """If it was started: its process id."""


class AgentStore:
    """The view of one agent, or of the coordinator; methods raise RuntimeError without a store.

    Nothing else may wait on its connection.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store

    def tell(self, task: int, index: int, event: Event) -> None:
        """Write event number `index`, from 0, of a task."""
        self._store.set(_key("event", task, index), json.dumps(asdict(event)))
        self._store.add(_key("events"), 1)

    def count_events(self) -> int:
        """Return the number of events of all tasks."""
        return int(self._store.add(_key("events"), 0))

    def read_event(self, task: int, index: int) -> Event | None:
        """Return an event of a task; None if there is none yet."""
        key = _key("event", task, index)
        return Event(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def beat(self, task: int) -> None:
        """Count a heartbeat of a task."""
        self._store.add(_key("beat", task), 1)

    def count_beats(self, tasks: Sequence[int]) -> list[int]:
        """Return the number of heartbeats of tasks in one request.

        It waits for the first heartbeat of each task, which an agent sends before its first event.
        """
        return [int(count) for count in self._store.multi_get([_key("beat", t) for t in tasks])]

    def ask_to_kill(self, number: int) -> None:
        """Ask the agent of a process to kill it."""
        self._store.set(_key("kill", number), "")
        self._store.add(_key("orders"), 1)

    def count_orders(self) -> int:
        """Return how often agents were asked to kill a process, or told the end of the job."""
        return int(self._store.add(_key("orders"), 0))

    def is_to_be_killed(self, number: int) -> bool:
        """Return whether the agent of a process is asked to kill it."""
        return bool(self._store.check([_key("kill", number)]))

    def end_job(self, code: int) -> None:
        """Tell all agents the exit code of the job."""
        self._store.set(_key("over"), str(code))
        self._store.add(_key("orders"), 1)

    def leave_if_over(self, task: int) -> int | None:
        """Return the exit code of the job once it is over, and announce that the task has read it.

        The store may be gone afterwards.
        """
        if not self._store.check([_key("over")]):
            return None
        code = int(self._store.get(_key("over")))
        self._store.set(_key("left", task), "")
        return code

    def has_left(self, task: int) -> bool:
        """Return whether a task has read the exit code of the job."""
        return bool(self._store.check([_key("left", task)]))


def _key(name: str, *numbers: int) -> str:
    return "/".join(["agents", name, *map(str, numbers)])
