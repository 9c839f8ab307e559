"""Replaces ranks of a Slurm job: each task of srun is an agent that forks processes for a rank.

An agent forks a process that waits for a rank, tells the coordinator when it ends, and forks the
next one. The agents of the first tasks begin with a rank each; those of the last `recovery.spares`
tasks wait, usually on nodes of their own. A dead process is replaced on its own node. If a node is
lost, its agents no longer answer, and waiting agents take over its ranks.

The coordinator (coordinator.py) runs in task 0, whose process also holds the store. If its node is
lost, all agents end, and one of them puts the job into Slurm's queue again (requeue.py).

Keys in the store, below `agents/`:

- `events`: number of events so far; `event/I`: event I as JSON: a process was started or has ended.
- `beat/T`: number of heartbeats of task T, one per second.
- `kill/N`: set by the coordinator; the agent of process N kills it.
- `over`: exit code of the job, set at its end.
"""

import json
import os
import platform
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from frontier_llm.errors import LaunchError
from frontier_llm.launch import failure
from frontier_llm.launch.connections import limit_silence
from frontier_llm.launch.coordinator import Coordinator, Replacing
from frontier_llm.launch.forked_ranks import POLL_SECONDS, ForkedRanks
from frontier_llm.launch.launcher import LaunchOptions, fork_rank, report_cause
from frontier_llm.launch.replacement import MemberTarget, run_member_process
from frontier_llm.launch.requeue import end_job_without_script
from frontier_llm.launch.roster_store import RosterStore
from frontier_llm.launch.stop import StopFlag
from frontier_llm.launch.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_BEAT_SECONDS = 1.0
"""Time between two heartbeats of an agent, and between two looks for what it is asked to do."""
_SILENCE_SECONDS = 5.0
"""An agent without a heartbeat for so long is taken for dead, and its node for lost."""
_STORE_SILENCE_SECONDS = 20.0
"""An agent ends if the node of the store has not received its messages for so long."""
_SUCCESSOR_SECONDS = 3.0
"""How long the coordinator waits for the next process of an agent."""
_EXIT_SECONDS = 30.0
"""How long a process may take to exit after the end of the job."""


@dataclass(frozen=True)
class TaskJob:
    """What all agents of a job know."""

    world: World
    """The task of this agent: `rank` is its number, `size` the number of tasks."""
    store: "Store"
    """The store of all tasks, which the process of task 0 holds."""
    target: MemberTarget
    """The work of a process that may hold a rank."""
    options: LaunchOptions
    """Number of ranks, without spares, and the folder for failures."""
    replacing: Replacing
    """How processes are replaced."""


def run_agent(job: TaskJob) -> int:
    """Be the agent of a task, and in task 0 also the coordinator; return the exit code.

    Raises:
        LaunchError: the task that coordinates the job is lost.
    """
    limit_silence(job.world.master_port, _STORE_SILENCE_SECONDS)
    agent = Agent(job)
    try:
        if job.world.rank == 0:
            return _coordinate(job, agent)
        while (code := agent.step()) is None:
            time.sleep(POLL_SECONDS)
        return agent.end(code)
    except RuntimeError as error:
        agent.processes.kill()
        end_job_without_script(os.environ)
        raise LaunchError(
            f"task {job.world.rank} lost contact with the job's store on task 0 at "
            f"{job.world.master_address} ({str(error).splitlines()[0]}): its node failed, or this "
            "one is cut off from the network"
        ) from None
    finally:
        agent.processes.kill()


def _coordinate(job: TaskJob, agent: "Agent") -> int:
    """Poll members and coordinator until the job has ended; return the exit code."""
    failure.clear(job.options.failure_dir)
    members = TaskMembers(job)
    members.wait_for_all(agent)
    first = range(job.options.ranks)
    coordinator = Coordinator(members, RosterStore(job.store), first, job.options, job.replacing)
    while (ended := coordinator.poll()) is None:
        agent.step()
        time.sleep(POLL_SECONDS)
    if not ended.exit_code:  # every rank is done; a request to stop has an exit code of its own
        coordinator.end()
        agent.wait(_EXIT_SECONDS)
        ended = report_cause({}, job.options)
    job.store.set("agents/over", str(ended.exit_code))
    members.wait_for_silence()
    return agent.end(ended.exit_code)


class Agent:
    """Forks one process after the other in the task of this process."""

    def __init__(self, job: TaskJob) -> None:
        self._job, self._task = job, job.world.rank
        self._forked, self._next_beat = 0, 0.0
        self._forwarded = False
        self.processes = ForkedRanks()
        self._fork()

    def step(self) -> int | None:
        """Do what is due; return the exit code of the job once it is over.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.processes.poll()
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            self._job.store.add(f"agents/beat/{self._task}", 1)
            if self._job.store.check(["agents/over"]):
                return int(self._job.store.get("agents/over"))
            self._kill_if_asked()
        if not self._forwarded and StopFlag.install().reason:
            self._forwarded = True
            self.processes.send(signal.SIGTERM)
        for number, (code, seconds) in self.processes.ended.items():
            if code in (0, 3):
                continue  # the job is over, or about to be
            self._tell({"number": number, "ended": code, "seconds": seconds})
            self._fork()
        self.processes.ended.clear()
        return None

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended by itself, and keep the heart beating."""
        deadline = time.monotonic() + seconds
        while self.processes.running and time.monotonic() < deadline:
            self.step()
            time.sleep(POLL_SECONDS)

    def end(self, code: int) -> int:
        """End the process, which may still close its files; return the exit code of the task."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while code in (0, 3) and self.processes.running and time.monotonic() < deadline:
            self.processes.poll()
            time.sleep(POLL_SECONDS)
        self.processes.kill()
        return code

    def _fork(self) -> None:
        job, world = self._job, self._job.world
        number = self._task + self._forked * world.size
        self._forked += 1

        def run() -> int:
            return run_member_process(
                number, job.target, job.options, partial(_world_of, job), partial(_connect, world)
            )

        fork_rank(self.processes, number, run)
        pid = self.processes.running[number]
        self._tell({"number": number, "pid": pid, "host": platform.node()})

    def _kill_if_asked(self) -> None:
        for number, pid in self.processes.running.items():
            if self._job.store.check([f"agents/kill/{number}"]):
                os.kill(pid, signal.SIGKILL)

    def _tell(self, event: Mapping[str, object]) -> None:
        index = self._job.store.add("agents/events", 1)
        self._job.store.set(f"agents/event/{index}", json.dumps(event))


class TaskMembers:
    """The processes of all agents, as the coordinator in task 0 sees them (members.py)."""

    def __init__(self, job: TaskJob) -> None:
        self._job, self._store, self._tasks = job, job.store, job.world.size
        self._read_events = 0
        self._newest: dict[int, int] = {}  # by task: its newest process
        self._places: dict[int, tuple[str, int]] = {}
        self._ended: dict[int, tuple[int, float, str]] = {}
        self._gone: set[int] = set()  # tasks whose agents do not answer
        self._beats: dict[int, tuple[int, float]] = {}
        self._next_look = 0.0

    @property
    def patience_seconds(self) -> float:
        """Time until every agent has a heartbeat after the loss of contact, or is silent."""
        beats = [since for task, (_, since) in self._beats.items() if task not in self._gone]
        if not beats:
            return 0.0
        return min(_SILENCE_SECONDS, time.monotonic() - min(beats)) + 2 * _BEAT_SECONDS

    def wait_for_all(self, agent: Agent) -> None:
        """Wait until every agent has forked its first process."""
        while len(self._newest) < self._tasks:
            agent.step()
            self._read()
            time.sleep(POLL_SECONDS)

    def take_ended(self) -> Mapping[int, tuple[int, float, str]]:
        """Return the processes that have ended, or whose agents do not answer."""
        self._read()
        self._look_for_silence()
        ended, self._ended = self._ended, {}
        return ended

    def waiting(self, held: Collection[int]) -> list[int]:
        """Return the processes of agents that answer, and that hold no rank."""
        return [
            newest
            for task, newest in sorted(self._newest.items())
            if task not in self._gone and newest not in held
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
            if self._newest[task] != number:
                return self._newest[task]
            time.sleep(POLL_SECONDS)
            self._read()
        waiting = self.waiting(held)
        return waiting[0] if waiting else None

    def kill(self, numbers: Iterable[int]) -> None:
        """Ask agents to kill processes."""
        for number in numbers:
            self._store.set(f"agents/kill/{number}", "")

    def place(self, number: int) -> tuple[str, int]:
        """Return host and process id."""
        return self._places[number]

    def wait_for_silence(self) -> None:
        """Wait until the agents have read that the job is over: task 0 holds the store."""
        time.sleep(2 * _BEAT_SECONDS)

    def _read(self) -> None:
        """Read new events."""
        count = self._store.add("agents/events", 0)
        while self._read_events < count:
            self._read_events += 1
            event = json.loads(self._store.get(f"agents/event/{self._read_events}"))
            number = event["number"]
            if "ended" in event:
                self._ended[number] = event["ended"], event["seconds"], ""
            else:
                self._newest[number % self._tasks] = number
                self._places[number] = event["host"], event["pid"]

    def _look_for_silence(self) -> None:
        """Take the processes of agents that have stopped to answer for dead."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _BEAT_SECONDS
        for task in range(self._tasks):
            if task in self._gone:
                continue
            count = self._store.add(f"agents/beat/{task}", 0)
            last, since = self._beats.get(task, (-1, now))
            if count != last:
                self._beats[task] = count, now
            elif now - since > _SILENCE_SECONDS:
                self._gone.add(task)
                number = self._newest[task]
                host = self._places[number][0]
                reason = f"is gone: its node {host} has not answered for {now - since:.0f} s"
                self._ended[number] = -signal.SIGKILL, time.time(), reason


def _world_of(job: TaskJob, rank: int) -> World:
    """Return the `World` of a rank that a process of this task holds."""
    return replace(job.world, rank=rank, size=job.options.ranks, hosts=())


def _connect(world: World) -> "Store":
    from torch.distributed import TCPStore
    from torch.distributed.distributed_c10d import PrefixStore

    store = TCPStore(
        world.master_address,
        world.master_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    return PrefixStore(f"frontier_llm/{world.job}", store)
