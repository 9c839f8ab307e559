"""A process that can hold a rank: what its threads do, and which errors it survives."""

import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from frontier_llm.errors import LaunchError
from frontier_llm.launch.forked_ranks import LaunchOptions, local_world
from frontier_llm.launch.world import World
from frontier_llm.membership import member as module
from frontier_llm.membership.member import RosterMembership
from frontier_llm.membership.roster_store import Roster, RosterStore
from tests.patience import wait_until


@pytest.mark.forked
def test_ranks_that_cannot_meet_end_only_the_first_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_NEWS_SECONDS", 0.2)
    held = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    store = RosterStore(held)

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", held.port, timeout=timedelta(seconds=20))

    world = World(0, 1, 0, 1, "node0", "local", "127.0.0.1", held.port)
    member = RosterMembership(5, lambda _: world, connect, held.port)
    absent = LaunchError("preflight: rank 1 did not report within 300 s")
    outlived = []
    for generation in range(2):
        store.publish(Roster(generation, (5,), 1.0))
        place = member.next_place()
        assert place is not None
        assert place.generation == generation
        outlived.append(member.outlives(absent))
        member.leave()
    assert outlived == [False, True]
    assert [store.has_lost_contact(generation) for generation in range(2)] == [False, True]
    assert [store.is_suspicious(generation) for generation in range(2)] == [False, True]


@pytest.mark.forked
def test_an_abort_ends_before_the_next_generation_or_is_left_out() -> None:
    """It would reach the groups of the next generation."""
    held = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    store = RosterStore(held)

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", held.port, timeout=timedelta(seconds=20))

    member = RosterMembership(
        5, lambda _: World(0, 1, 0, 1, "node0", "local", "127.0.0.1", held.port), connect, held.port
    )
    events: list[str] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def abort() -> None:
        has_begun.set()
        assert may_end.wait(20)
        events.append("aborted")

    member.abort = abort
    store.publish(Roster(0, (5,), 1.0))
    assert member.next_place() is not None
    store.publish(Roster(1, (5,), 1.0))
    wait_until(has_begun.is_set, "the abort")
    threading.Timer(0.2, may_end.set).start()
    member.leave()
    events.append("left")
    member._cut(1)  # its thread had to wait for a core
    assert events == ["aborted", "left"]


@pytest.mark.forked
def test_the_thread_that_waits_for_rosters_does_not_read_them(tmp_path: Path) -> None:
    keys = HashStore()
    options = LaunchOptions(ranks=2, failure_dir=tmp_path)
    RosterMembership(1, lambda rank: local_world(rank, options, 1), lambda: keys, 1)
    for generation in range(2):
        keys.set(f"members/roster/{generation}", "not a roster")
        seen = [f"members/seen/{generation}/1"]
        wait_until(partial(keys.check, seen), "the thread, which has ended")
