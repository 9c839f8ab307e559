"""Which processes take the ranks of dead ones, on two nodes of two ranks and two spare nodes."""

import signal
from collections.abc import Collection, Iterable, Mapping

import pytest

from frontier_llm.launch import failure
from frontier_llm.membership.successors import Successors

NODE, TASKS = 2, 8


class Tasks:
    """Processes of tasks whose agents answer, two on each host."""

    patience_seconds = 0.0

    def __init__(self) -> None:
        self.running = list(range(TASKS))
        self.killed: list[int] = []

    def take_ended(self, *, is_suspicious: bool = False) -> Mapping[int, tuple[int, float, str]]:
        return {}

    def waiting(self, held: Collection[int]) -> list[int]:
        return [number for number in self.running if number not in held]

    def successor(
        self, number: int, held: Collection[int], *, elsewhere: bool = False
    ) -> int | None:
        waiting = self.waiting(held)
        return waiting[0] if waiting else None

    def kill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.killed.append(number)
            self.running.remove(number)

    def place(self, number: int) -> tuple[str, int]:
        return f"host{number % TASKS // NODE}", number


def died(*ranks: int) -> dict[int, failure.Failure]:
    return {rank: failure.died(rank, -signal.SIGKILL, 0.0) for rank in ranks}


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture
def successors(tasks: Tasks) -> Successors:
    return Successors(tasks, NODE)


def test_ranks_of_a_node_move_together_to_one_node(tasks: Tasks, successors: Successors) -> None:
    roster = [0, 1, 2, 3]
    tasks.running.remove(4)  # host2 no longer has two processes that wait
    successors.move([3], roster)
    assert tasks.killed == [2, 3]
    assert not successors.have_ended({3}, roster), "the process of rank 2 still runs"
    assert successors.have_ended({2, 3}, roster)
    assert successors.assign(died(2, 3), roster) == []
    assert roster == [0, 1, 6, 7]


def test_the_node_that_ranks_have_left_is_the_last_choice(
    tasks: Tasks, successors: Successors
) -> None:
    roster = [0, 1, 2, 3]
    successors.move([0], roster)
    successors.assign(died(0, 1), roster)
    tasks.running += [TASKS, TASKS + 1]  # the agents of the first node have started them
    successors.move([2], roster)
    successors.assign(died(2, 3), roster)
    assert roster == [4, 5, 6, 7]


def test_a_silent_task_takes_its_node_with_it(tasks: Tasks, successors: Successors) -> None:
    roster = [0, 1, 2, 3]
    tasks.running.remove(1)
    successors.leave_lost_node(1, roster)
    assert tasks.killed == [0]
    assert successors.assign(died(0, 1), roster) == []
    assert roster == [4, 5, 2, 3]


def test_without_a_whole_node_a_slow_rank_stays(
    tasks: Tasks, successors: Successors, capsys: pytest.CaptureFixture[str]
) -> None:
    roster = [0, 1, 2, 3]
    tasks.running = [0, 1, 2, 3, 5, 6]
    successors.move([0], roster)
    assert tasks.killed == []
    assert (
        "no node waits that could take over ranks 0 to 1 (recovery.spares)"
        in capsys.readouterr().err
    )
    successors.swap(0, roster)
    assert tasks.killed == [0], "rank 1 keeps its process"
    assert successors.have_ended((), roster), "rank 0 gets a new process, and does not move"


def test_a_rank_without_files_on_its_node_moves_alone(tasks: Tasks) -> None:
    roster, alone = [0, 1, 2, 3], Successors(tasks, 1)
    alone.move([3], roster)
    assert tasks.killed == [3]
    assert alone.assign(died(3), roster) == []
    assert roster == [0, 1, 2, 4]


def test_ranks_for_which_no_process_waits_are_missing(
    tasks: Tasks, successors: Successors, capsys: pytest.CaptureFixture[str]
) -> None:
    roster = [0, 1, 2, 3]
    tasks.running = [1, 2, 3, 5]
    tasks.kill([1])
    assert successors.assign(died(0, 1), roster) == [1]
    assert roster == [5, 1, 2, 3]
    assert "rank 1 was killed by SIGKILL; no process waits" in capsys.readouterr().err
