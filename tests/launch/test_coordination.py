"""A text of rank 0, or its failure, reaches all ranks through the store."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from frontier_llm.errors import DataError, RankFailure
from frontier_llm.launch.coordination import broadcast_from_rank_zero, read_all
from tests.ranks import run_ranks

SECONDS = timedelta(minutes=5)


def store_in(folder, world):
    return dist.FileStore(str(folder / "store"), world.size)


def test_a_text_of_rank_zero_reaches_all_ranks(tmp_path):
    def work(world):
        store = store_in(tmp_path, world)
        return broadcast_from_rank_zero(
            world, store, "text", lambda: f"made by {world.rank}", SECONDS
        )

    assert run_ranks(work, 3) == ["made by 0"] * 3


def test_a_failure_on_rank_zero_ends_all_ranks_with_its_code(tmp_path):
    def fail():
        error = DataError("no such corpus")
        error.exit_code = 2
        raise error

    def work(world):
        store = store_in(tmp_path, world)
        with pytest.raises((DataError, RankFailure)) as caught:
            broadcast_from_rank_zero(world, store, "text", fail, SECONDS)
        return str(caught.value), caught.value.exit_code

    assert run_ranks(work, 3) == [("no such corpus", 2), ("", 2), ("", 2)]


def test_waiting_for_rank_zero_times_out(tmp_path):
    def work(world):
        store = store_in(tmp_path, world)
        if world.rank == 1:
            with pytest.raises(RankFailure, match=r"no answer \(text\) from rank 0"):
                broadcast_from_rank_zero(world, store, "text", str, timedelta(seconds=1))

    run_ranks(work, 2)


def test_values_of_many_ranks_are_read_in_small_answers():
    class Counting:
        def __init__(self):
            self.requests = []

        def multi_get(self, keys):
            self.requests.append(len(keys))
            return [key.encode() for key in keys]

    store = Counting()
    keys = [f"rank/{rank}" for rank in range(1000)]
    assert read_all(store, keys) == [key.encode() for key in keys]
    assert max(store.requests) <= 64
    assert read_all(store, []) == []
