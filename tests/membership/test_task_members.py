"""The coordinator's view of the processes of a Slurm job, with a real store."""

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest
from torch.distributed import HashStore

from frontier_llm.errors import LaunchError
from frontier_llm.membership import task_members
from frontier_llm.membership.task_members import AgentStore, Event, TaskMembers
from tests.patience import patient

TASKS = 3


class Agents:
    """Tells what agents of tasks would tell."""

    def __init__(self, tasks: int = TASKS) -> None:
        self.keys = HashStore()
        self.store = AgentStore(self.keys)
        self._told = dict.fromkeys(range(tasks), 0)

    def start(self, number: int) -> None:
        self.store.beat(number % len(self._told))
        self.tell(Event(number, host="host", pid=100 + number))

    def end(self, number: int) -> None:
        self.tell(Event(number, -signal.SIGKILL, 1.0))

    def tell(self, event: Event) -> None:
        task = event.number % len(self._told)
        self.store.tell(task, self._told[task], event)
        self._told[task] += 1


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
def members(agents: Agents) -> TaskMembers:
    for number in range(TASKS):
        agents.start(number)
    found = TaskMembers(agents.store, TASKS)
    found.wait_for_all(lambda: None)
    return found


def test_an_agent_that_dies_while_it_tells_an_event_stops_nobody(
    agents: Agents, members: TaskMembers
) -> None:
    agents.keys.set("agents/event/1/1", json.dumps(asdict(Event(1, -signal.SIGKILL))))
    assert not members.take_ended(), "the event was not counted"
    agents.end(0)
    assert set(members.take_ended()) == {0, 1}


def test_a_process_that_ended_while_it_waited_gets_no_rank(
    agents: Agents, members: TaskMembers
) -> None:
    agents.end(2)
    assert list(members.take_ended()) == [2]
    assert members.waiting([0, 1]) == []
    agents.end(1)
    members.take_ended()
    agents.start(4)
    assert members.successor(1, [0, 1]) == 4
    assert members.waiting([0, 4]) == []


def test_two_ranks_do_not_get_the_same_process(
    agents: Agents, members: TaskMembers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_members, "_SUCCESSOR_SECONDS", 0.1)
    agents.end(0)
    agents.end(1)
    agents.start(4)
    assert set(members.take_ended()) == {0, 1}
    held = [0, 1, 2]
    held[0] = members.successor(0, held, elsewhere=True) or -1
    assert held == [4, 1, 2]
    assert members.successor(1, held) is None


class Clock:
    """The clock of the members, which a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    time = staticmethod(time.time)

    def watch(
        self,
        agents: Agents,
        members: TaskMembers,
        beating: Callable[[float], range],
        seconds: float = 1.2,
    ) -> tuple[float, set[int]]:
        """Poll, being suspicious, while some tasks send heartbeats; return when which ended."""
        start = self.now
        while (passed := self.now - start) < seconds:
            for task in beating(passed):
                agents.store.beat(task)
            if ended := members.take_ended(is_suspicious=True):
                return passed, set(ended)
            self.sleep(0.02)
        return passed, set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(task_members, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(task_members, "_DOUBT_SECONDS", 0.3)
    monkeypatch.setattr(task_members, "_SUSPECT_SECONDS", 0.5)
    clock = Clock()
    monkeypatch.setattr(task_members, "time", clock)
    return clock


def test_agents_of_a_lost_node_are_reported_at_once(clock: Clock) -> None:
    agents = Agents(5)
    for number in range(5):
        agents.start(number)
    members = TaskMembers(agents.store, 5)
    members.wait_for_all(lambda: None)

    def some(now: float) -> range:
        return range(5 if now < 0.3 else 4 if now < 0.38 else 3)

    now, ended = clock.watch(agents, members, some)
    assert ended == {3, 4}
    assert 0.8 < now < 1.15


def test_if_most_agents_are_silent_the_store_is_slow(
    clock: Clock, agents: Agents, members: TaskMembers
) -> None:
    assert not clock.watch(agents, members, lambda now: range(3 if now < 0.2 else 1))[1]


def test_an_agent_that_was_slow_is_not_lost(
    clock: Clock, agents: Agents, members: TaskMembers
) -> None:
    assert not clock.watch(agents, members, lambda now: range(2 if 0.2 < now < 0.6 else 3))[1]


def test_after_a_pause_of_task_0_no_agent_is_lost(
    clock: Clock, agents: Agents, members: TaskMembers
) -> None:
    clock.watch(agents, members, lambda _: range(3), 0.3)
    clock.sleep(0.8)
    assert not members.take_ended(is_suspicious=True)
    assert not clock.watch(agents, members, lambda now: range(3 if now > 0.3 else 0))[1]


def test_tasks_that_do_not_come_are_named(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_members, "_MEETING_SECONDS", 0.1)
    agents.start(1)
    with pytest.raises(LaunchError, match=r"2 of 3 tasks did not start .*: tasks 0, 2\."):
        TaskMembers(agents.store, TASKS).wait_for_all(lambda: None)


def test_task_0_keeps_the_store_until_the_others_have_read_the_end(
    agents: Agents, members: TaskMembers
) -> None:
    assert agents.store.count_orders() == 0
    agents.store.end_job(0)
    assert agents.store.count_orders() == 1
    assert agents.store.leave_if_over(1) == 0
    waits = threading.Thread(target=members.wait_until_left)
    waits.start()
    time.sleep(0.2)
    assert waits.is_alive(), "task 2 has not read it"
    assert agents.store.leave_if_over(2) == 0
    waits.join(patient(5))
    assert not waits.is_alive()
