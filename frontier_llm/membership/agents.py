"""Replaces ranks of a Slurm job: each task of srun is an agent that forks processes for a rank.

An agent forks a process that waits for a rank, tells the coordinator when it ends, and forks the
next one. The agents of the first tasks begin with a rank each; those of the last `recovery.spares`
tasks wait, usually on nodes of their own. A dead process is replaced on its own node. If a node is
lost, its agents no longer answer, and waiting agents take over its ranks.

The coordinator (coordinator.py) runs in task 0, whose process also holds the store. If its node is
lost, all agents end, and one of them puts the job into Slurm's queue again (requeue.py).

task_members.py has what agents and coordinator tell each other, and the coordinator's view of the
processes.
"""

import os
import platform
import signal
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from frontier_llm.errors import LaunchError
from frontier_llm.launch import failure
from frontier_llm.launch.forked_ranks import POLL_SECONDS, ForkedRanks, LaunchOptions, fork_rank
from frontier_llm.launch.rendezvous import connect_again
from frontier_llm.launch.requeue import end_job_without_script
from frontier_llm.launch.stop import StopFlag
from frontier_llm.launch.world import World
from frontier_llm.membership.connections import limit_silence
from frontier_llm.membership.coordinator import Coordinator, Replacing
from frontier_llm.membership.launcher import run_member_process
from frontier_llm.membership.member import Member
from frontier_llm.membership.roster_store import RosterStore
from frontier_llm.membership.task_members import BEAT_SECONDS, AgentStore, Event, TaskMembers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_STORE_SILENCE_SECONDS = 20.0
"""An agent ends if the node of the store has not received its messages for so long."""
_EXIT_SECONDS = 30.0
"""How long a process may take to exit after the end of the job."""


@dataclass(frozen=True)
class TaskJob:
    """What all agents of a job know."""

    world: World
    """The task of this agent: `rank` is its number, `size` the number of tasks."""
    store: "Store"
    """The store of all tasks."""
    target: Member
    options: LaunchOptions
    """`ranks` is the number without spares."""
    replacing: Replacing


def run_agent(job: TaskJob) -> int:
    """Be the agent of a task, and in task 0 also the coordinator; return the exit code.

    Raises LaunchError if the task that coordinates the job is lost.
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
    failure.clear(job.options.failure_dir)
    agents = AgentStore(job.store)
    members = TaskMembers(agents, job.world.size)
    members.wait_for_all(agent.step)
    first = range(job.options.ranks)
    coordinator = Coordinator(members, RosterStore(job.store), first, job.options, job.replacing)
    while (ended := coordinator.poll()) is None:
        agent.step()
        time.sleep(POLL_SECONDS)
    if not ended.exit_code:  # every rank is done; a request to stop has an exit code of its own
        coordinator.end()
        agent.wait(_EXIT_SECONDS)
        ended = failure.report_cause({}, job.options.ranks, job.options.failure_dir)
    agents.end_job(ended.exit_code)
    members.wait_until_left()
    return agent.end(ended.exit_code)


class Agent:
    """Forks one process after the other in the task of this process."""

    def __init__(self, job: TaskJob) -> None:
        self._job, self._task, self._store = job, job.world.rank, AgentStore(job.store)
        self._forked, self._told, self._orders, self._next_beat = 0, 0, 0, 0.0
        self._forwarded = False
        self.processes = ForkedRanks()
        self._store.beat(self._task)
        self._fork()

    def step(self) -> int | None:
        """Do what is due; return the exit code of the job once it is over.

        Raises RuntimeError if the store does not answer.
        """
        self.processes.poll()
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._store.beat(self._task)
            if (over := self._obey()) is not None:
                return over
        if not self._forwarded and StopFlag.install().reason:
            self._forwarded = True
            self.processes.send(signal.SIGTERM)
        for number, (code, seconds) in self.processes.ended.items():
            if code in (0, 3):
                continue  # the job is over, or about to be
            self._tell(Event(number, code, seconds))
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
        if code in (0, 3):
            self.processes.wait(_EXIT_SECONDS)
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
        self._tell(Event(number, host=platform.node(), pid=pid))

    def _obey(self) -> int | None:
        """Kill processes as the coordinator asks; return the exit code of the job once over."""
        if (orders := self._store.count_orders()) == self._orders:
            return None
        self._orders = orders
        for number in self.processes.running:
            if self._store.is_to_be_killed(number):
                self.processes.kill_rank(number)
        return self._store.leave_if_over(self._task)

    def _tell(self, event: Event) -> None:
        self._store.tell(self._task, self._told, event)
        self._told += 1


def _world_of(job: TaskJob, rank: int) -> World:
    return replace(job.world, rank=rank, size=job.options.ranks, hosts=())


def _connect(world: World) -> "Store":
    from torch.distributed.distributed_c10d import PrefixStore

    store = connect_again(world.master_address, world.master_port, timedelta(seconds=60))
    return PrefixStore(f"frontier_llm/{world.job}", store)
