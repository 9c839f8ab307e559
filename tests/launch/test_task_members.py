"""The coordinator's view of the processes of a Slurm job, with a real store."""

import json
import signal
import threading
import time
from dataclasses import asdict

import pytest
from torch.distributed import HashStore

from frontier_llm.errors import LaunchError
from frontier_llm.launch import task_members
from frontier_llm.launch.agent_store import AgentStore, Event
from frontier_llm.launch.task_members import TaskMembers

TASKS = 3


class Agents:
    """Tells what agents of tasks would tell."""

    def __init__(self) -> None:
        self.keys = HashStore()
        self.store = AgentStore(self.keys)
        self._told = dict.fromkeys(range(TASKS), 0)

    def start(self, number: int) -> None:
        self.tell(Event(number, host="host", pid=100 + number))

    def end(self, number: int) -> None:
        self.tell(Event(number, -signal.SIGKILL, 1.0))

    def tell(self, event: Event) -> None:
        task = event.number % TASKS
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


def test_tasks_that_do_not_come_are_named(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_members, "_MEETING_SECONDS", 0.1)
    agents.start(1)
    with pytest.raises(LaunchError, match=r"2 of 3 tasks did not start .*: tasks 0, 2\."):
        TaskMembers(agents.store, TASKS).wait_for_all(lambda: None)


def test_task_0_keeps_the_store_until_the_others_have_read_the_end(
    agents: Agents, members: TaskMembers
) -> None:
    agents.store.end_job(0)
    assert agents.store.leave_if_over(1) == 0
    waits = threading.Thread(target=members.wait_until_left)
    waits.start()
    time.sleep(0.2)
    assert waits.is_alive(), "task 2 has not read it"
    assert agents.store.leave_if_over(2) == 0
    waits.join(5)
    assert not waits.is_alive()
