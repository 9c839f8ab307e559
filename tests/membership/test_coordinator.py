"""What the coordinator of a job decides, with a real store and processes that are numbers."""

import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from frontier_llm.launch.failure import Ended
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.membership import coordinator
from frontier_llm.membership.coordinator import RANKS_FILE, SWAP_FILE, Coordinator, Replacing
from frontier_llm.membership.roster_store import RosterStore

RANKS = 3


class Numbers:
    """Members that die when they are killed, or when a test says so."""

    patience_seconds = 0.0

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.ended: dict[int, tuple[int, float, str]] = {}
        self._newest = RANKS - 1

    def take_ended(self, *, is_suspicious: bool = False) -> Mapping[int, tuple[int, float, str]]:
        ended, self.ended = self.ended, {}
        return ended

    def waiting(self, held: Collection[int]) -> list[int]:
        return []

    def successor(
        self, number: int, held: Collection[int], *, elsewhere: bool = False
    ) -> int | None:
        self._newest += 1
        return self._newest

    def kill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.killed.append(number)
            self.ended[number] = -signal.SIGKILL, 0.0, ""

    def place(self, number: int) -> tuple[str, int]:
        return "host", number


class Job:
    """A coordinator, its store, and its members."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self.members, self._keys = Numbers(), HashStore()
        self.store = RosterStore(self._keys)
        self.replacing = replace(Replacing(folder, 0, 10, 3.0, lambda: 0), **changes)
        options = LaunchOptions(ranks=RANKS, failure_dir=folder / "failures")
        self.coordinator = Coordinator(
            self.members, self.store, range(RANKS), options, self.replacing
        )

    def roster(self, generation: int) -> tuple[int, ...] | None:
        assert self._keys.check([f"members/roster/{generation}"]), "it has not begun"
        return self.store.wait_for(generation).members

    def arrive(self, generation: int, ranks: Iterable[int] = range(RANKS)) -> None:
        for rank in ranks:
            self.store.report_arrival(generation, rank)

    def lose_contact(self, generation: int) -> Ended | None:
        """Report a loss of contact after all ranks have arrived, and let the coordinator act."""
        self.arrive(generation)
        assert self.coordinator.poll() is None
        self.store.report_lost_contact(generation, 0)
        self.coordinator.poll()
        return self.coordinator.poll()


def test_a_run_that_loses_contact_too_often_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, tries=1)
    assert job.lose_contact(0) is None
    assert job.lose_contact(1) is None, "the ranks save what they have"
    for _ in range(RANKS):
        job.store.report_done(2)
    ended = job.coordinator.poll()
    assert ended == Ended(1)
    printed = capsys.readouterr().err
    assert "ranks lost contact with each other 2 times without a new step" in printed
    assert "look for errors of the network" in printed


def test_only_a_stopped_rank_is_killed_while_slow_ranks_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_STOPPED_SECONDS", 0.0)
    job = Job(tmp_path, timeout_seconds=0.0)
    job.arrive(0, [0])
    job.store.report_seen(0, 1)
    job.coordinator.poll()
    assert job.members.killed == [2], "rank 1 is in a long step, rank 2 is stopped"


def test_a_slow_rank_that_never_comes_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_STOPPED_SECONDS", 0.0)
    job = Job(tmp_path, timeout_seconds=0.0, arrival_seconds=0.0)
    job.arrive(0, [0, 2])
    job.store.report_seen(0, 1)
    job.coordinator.poll()
    assert job.members.killed == [1]


def test_a_file_that_is_not_written_yet_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_POLLS_PER_LOOK", 1)
    job = Job(tmp_path)
    with (tmp_path / SWAP_FILE).open("w") as file:
        job.coordinator.poll()
        file.write("rank=1")
    job.coordinator.poll()
    assert job.members.killed == [1]
    assert not (tmp_path / SWAP_FILE).exists()


def test_an_error_of_the_file_system_does_not_end_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_POLLS_PER_LOOK", 1)
    for name in (RANKS_FILE, SWAP_FILE, "failures/rank_1.json"):
        (tmp_path / name).mkdir(parents=True)  # neither read, nor written, nor unlinked as a file
    job = Job(tmp_path)
    for number in (1, RANKS):
        job.members.ended[number] = 1, 0.0, ""
        assert job.coordinator.poll() is None
    assert job.roster(2) == (0, RANKS + 1, 2)
    printed = capsys.readouterr().err
    assert printed.count("the starts of ranks cannot be recorded, and the run goes on") == 1
    assert printed.count("why ranks failed cannot be read") == 1
    assert printed.count("earlier failures cannot be removed") == 1
    assert printed.count("the file SWAP cannot be read or removed") == 1
