"""The load on the key-value store while ranks decide on a checkpoint."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from frontier_llm.checkpoint.commit_barrier import CommitBarrier, Ranks
from frontier_llm.errors import CheckpointError
from tests.patience import patient

SIZE = 20


class CountingStore:
    """A store that counts calls of `check`."""

    def __init__(self) -> None:
        self.store, self.checked = dist.HashStore(), 0

    def check(self, keys: list[str]) -> bool:
        self.checked += 1
        return bool(self.store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_only_one_waiting_rank_asks_the_store_which_ranks_are_missing() -> None:
    """All ranks time out at once, and the store has a single thread."""
    store, limit = CountingStore(), round(patient(0.25))
    waiting = [rank for rank in range(1, SIZE) if rank != 7]
    all_have_arrived = threading.Barrier(len(waiting))

    def wait(rank: int) -> str:
        ranks = Ranks(rank, SIZE, store, timedelta(seconds=limit))  # type: ignore[arg-type]
        barrier = CommitBarrier("save", ranks)
        barrier.arrive("")
        all_have_arrived.wait()
        try:
            barrier.wait_for_outcome()
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(SIZE) as threads:
        messages = set(threads.map(wait, waiting))
    assert len(messages) == 1, "all ranks report the first cause"
    assert messages.pop().startswith(f"ranks 0, 7 did not write within {limit} s of rank ")
    assert store.checked == SIZE
