"""The processes of a Slurm job that may hold a rank, as the coordinator in task 0 sees them.

Task T has one process at a time. Its processes have the numbers T, T + tasks, T + 2 x tasks, ...

The agents of the tasks and the coordinator meet in the store of all tasks. Keys, all below
`agents/`:

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
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from frontier_llm.errors import LaunchError
from frontier_llm.launch.forked_ranks import POLL_SECONDS

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BEAT_SECONDS = 0.5
"""Time between two heartbeats of an agent, and between two looks for what it is asked to do."""
_SILENCE_SECONDS = 5.0
"""An agent without a heartbeat for so long is taken for dead, and its node for lost."""
_SUSPECT_SECONDS = 2.0
"""The same, if ranks have lost contact with each other, or do not come to a new generation.
It applies only if at least half of the agents answer: otherwise the store is probably overloaded by
ranks that connect again."""
_DOUBT_SECONDS = 1.1
"""An agent without a heartbeat for so long may be dead. Agents of a lost node become silent one
after the other within a heartbeat, and are all reported at once."""
_SUCCESSOR_SECONDS = 3.0
_MEETING_SECONDS = 60.0
"""How long the coordinator waits for the first process of the next agent. All agents begin at the
same time, when task 0 has prepared the run."""
_LEAVE_SECONDS = 30.0
"""How long task 0 keeps the store for agents that have not read that the job is over."""


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


class TaskMembers:
    """The processes of all agents; see `Members`."""

    def __init__(self, store: AgentStore, tasks: int) -> None:
        self._store, self._tasks = store, tasks
        self._read_events = 0
        self._next_event = dict.fromkeys(range(tasks), 0)  # by task
        self._newest: dict[int, int] = {}  # by task: its newest process
        self._places: dict[int, tuple[str, int]] = {}
        self._ended: dict[int, tuple[int, float, str]] = {}  # not yet taken
        self._dead: set[int] = set()  # all processes that have ended
        self._gone: set[int] = set()  # tasks whose agents do not answer
        self._beats: dict[int, tuple[int, float]] = {}  # by task: how many, and since when
        self._last_look = time.monotonic()

    @property
    def patience_seconds(self) -> float:
        """Time until every agent has a heartbeat after the loss of contact, or is silent."""
        beats = [since for task, (_, since) in self._beats.items() if task not in self._gone]
        if not beats:
            return 0.0
        return min(_SUSPECT_SECONDS, time.monotonic() - min(beats)) + 2 * BEAT_SECONDS

    def wait_for_all(self, step: Callable[[], object]) -> None:
        """Call `step` again and again until every agent has forked its first process.

        Raises LaunchError if no agent has come for some time, and not all have.
        """
        count, since = 0, time.monotonic()
        while len(self._newest) < self._tasks:
            step()
            self._read()
            if len(self._newest) > count:
                count, since = len(self._newest), time.monotonic()
            if time.monotonic() - since > _MEETING_SECONDS:
                absent = [str(task) for task in range(self._tasks) if task not in self._newest]
                raise LaunchError(
                    f"{len(absent)} of {self._tasks} tasks did not start a process, and none came "
                    f"in the last {_MEETING_SECONDS:g} s: tasks {', '.join(absent[:16])}. Their "
                    "nodes may have failed while task 0 prepared the run"
                )
            time.sleep(POLL_SECONDS)

    def take_ended(self, *, is_suspicious: bool = False) -> Mapping[int, tuple[int, float, str]]:
        """Return the processes that have ended, or whose agents do not answer."""
        self._read()
        self._look_for_silence(_SUSPECT_SECONDS if is_suspicious else _SILENCE_SECONDS)
        ended, self._ended = self._ended, {}
        return ended

    def waiting(self, held: Collection[int]) -> list[int]:
        """Return the processes that run, whose agents answer, and that hold no rank."""
        return [
            newest for task, newest in sorted(self._newest.items()) if self._is_free(task, held)
        ]

    def successor(
        self, number: int, held: Collection[int], *, elsewhere: bool = False
    ) -> int | None:
        """Return the next process of the same agent, or one of an agent that waits."""
        task = number % self._tasks
        if elsewhere:
            others = [other for other in self.waiting(held) if other % self._tasks != task]
            if others:
                return others[0]
        deadline = time.monotonic() + _SUCCESSOR_SECONDS
        while task not in self._gone and time.monotonic() < deadline:
            if self._is_free(task, held):
                return self._newest[task]
            time.sleep(POLL_SECONDS)
            self._read()
        waiting = self.waiting(held)
        return waiting[0] if waiting else None

    def kill(self, numbers: Iterable[int]) -> None:
        """Ask agents to kill processes."""
        for number in numbers:
            self._store.ask_to_kill(number)

    def place(self, number: int) -> tuple[str, int]:
        """Return host and process id."""
        return self._places[number]

    def wait_until_left(self) -> None:
        """Wait until the agents of the other tasks have read that the job is over.

        Task 0 holds the store. An agent that finds it gone before takes the job for failed.
        """
        present = set(range(1, self._tasks)) - self._gone
        deadline = time.monotonic() + _LEAVE_SECONDS
        while present and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            present = {task for task in present if not self._store.has_left(task)}

    def _is_free(self, task: int, held: Collection[int]) -> bool:
        newest = self._newest[task]
        return task not in self._gone and newest not in self._dead and newest not in held

    def _read(self) -> None:
        count = self._store.count_events()
        if count == self._read_events:
            return
        self._read_events = count
        for task in range(self._tasks):
            while (event := self._store.read_event(task, self._next_event[task])) is not None:
                self._next_event[task] += 1
                if event.code is None:
                    self._newest[task] = event.number
                    self._places[event.number] = event.host, event.pid
                else:
                    self._end(event.number, event.code, event.seconds)

    def _end(self, number: int, code: int, seconds: float, reason: str = "") -> None:
        """Remember the end of a process; only the first is reported."""
        if number not in self._dead:
            self._dead.add(number)
            self._ended[number] = code, seconds, reason

    def _look_for_silence(self, limit: float) -> None:
        """Take the processes of agents for dead that have sent no heartbeat for `limit` seconds."""
        now = time.monotonic()
        if (elapsed := now - self._last_look) < BEAT_SECONDS / 2:
            return
        self._last_look = now
        self._count_beats(now, was_paused=elapsed > _DOUBT_SECONDS)
        silent = {task: now - since for task, (_, since) in self._beats.items()
                  if task not in self._gone and now - since > _DOUBT_SECONDS}  # fmt: skip
        if len(silent) > (self._tasks - len(self._gone)) / 2:
            limit = _SILENCE_SECONDS
        longest = max(silent.values(), default=0.0)
        if longest < limit or (min(silent.values()) < limit and longest < limit + 2 * BEAT_SECONDS):
            return
        for task, seconds in silent.items():
            if seconds >= limit:
                self._gone.add(task)
                number = self._newest[task]
                host = self._places[number][0]
                reason = f"is gone: its node {host} has not answered for {seconds:.0f} s"
                self._end(number, -signal.SIGKILL, time.time(), reason)

    def _count_beats(self, now: float, *, was_paused: bool) -> None:
        """Read how many heartbeats each agent has sent.

        If this process did nothing for some time, the store, which is in the same process, may not
        have received the heartbeats of this time yet.
        """
        tasks = [task for task in range(self._tasks) if task not in self._gone]
        for task, count in zip(tasks, self._store.count_beats(tasks), strict=True):
            if was_paused or task not in self._beats or count != self._beats[task][0]:
                self._beats[task] = count, now
