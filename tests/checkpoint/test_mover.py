"""Which checkpoints of a node's disk must stay until they are copied."""

import threading
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.mover import Mover
from frontier_llm.checkpoint.retention import prune
from tests.properties import examples


class SilentStore:
    """A store whose rank 0 never decides."""

    def __init__(self):
        self.ended = threading.Event()

    def clone(self):
        return self

    def wait(self, keys, timeout):
        self.ended.wait()
        raise RuntimeError("no rank 0")


@pytest.fixture
def queue_of():
    stores = []

    def make(steps, committed, permanent=0):
        stores.append(SilentStore())
        ranks = Ranks(1, 2, stores[-1], timedelta(seconds=5))
        mover = Mover(
            "drain", "the run directory", ranks, lambda *_: None,
            is_permanent=lambda step: bool(permanent) and step % permanent == 0,
        )  # fmt: skip
        for step in steps:
            mover.enqueue(step, {})
        for step in committed:
            mover.saved(step, "committed")
        return mover

    yield make
    for store in stores:
        store.ended.set()


def test_steps_stay_until_a_newer_one_is_committed_on_every_rank(queue_of):
    assert queue_of([2, 4, 6, 8], [2]).spared() == {2, 4, 6, 8}, "none of them can replace 4"
    assert queue_of([2, 4, 6, 8], [2, 4, 6]).spared() == {2, 4, 6, 8}, "rank 0 may not know of 6"
    assert queue_of([2, 4, 6, 8], [2, 4, 6, 8]).spared() == {2, 6, 8}, "2 is being copied"
    assert queue_of([2, 4, 6, 8], [2, 4, 6, 8], permanent=4).spared() == {2, 4, 6, 8}
    assert queue_of([], []).spared() == set()


def test_unfinished_copies_of_waiting_steps_are_not_removed(queue_of, tmp_path):
    copies = [tmp_path / f"step_{step:08d}.partial" for step in (20, 26, 28)]
    for copy in copies:
        copy.mkdir()
    prune(tmp_path, 30, 1, None, queue_of([26, 28, 29], [26, 28, 29]).queued())
    assert sorted(tmp_path.iterdir()) == copies[1:], "28 may begin as soon as 26 has ended"


@examples(200)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_no_rank_deletes_a_step_that_rank_0_may_still_choose(queue, known, lag):
    """Rank 0 commits in order and knows of all commits but the last one, of which others know."""
    committed = list(range(1, min(known, queue) + 1))
    at_rank_0 = committed[: len(committed) - min(lag, 1)]
    ranks = Ranks(1, 2, SilentStore(), timedelta(seconds=1))
    mover = Mover("drain", "there", ranks, lambda *_: None)
    mover._queue = list(range(1, queue + 1))
    mover._saved = dict.fromkeys(committed, "committed")
    chosen = {s for s in at_rank_0 if not any(newer > s for newer in at_rank_0)}
    assert chosen <= set(mover.spared())
