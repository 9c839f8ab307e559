"""Who asks whom while a checkpoint is decided."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from frontier_llm.checkpoint.commit import Ballot
from frontier_llm.errors import CheckpointError

SIZE = 20


class Counted:
    """A store that counts the keys that are looked for."""

    def __init__(self) -> None:
        self.store, self.checked = dist.HashStore(), 0

    def check(self, keys: list[str]) -> bool:
        self.checked += 1
        return bool(self.store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_one_of_all_that_were_kept_waiting_asks_who_is_missing() -> None:
    """All do so at once, and the store has one thread."""
    store = Counted()

    def wait(rank: int) -> str:
        ballot = Ballot(store, "save", rank, SIZE, timedelta(seconds=1))  # type: ignore[arg-type]
        ballot.arrive("")
        try:
            ballot.wait_for_end()
        except CheckpointError as error:
            return str(error)
        return ""

    waiting = [rank for rank in range(1, SIZE) if rank != 7]
    with ThreadPoolExecutor(SIZE) as threads:
        said = set(threads.map(wait, waiting))
    assert len(said) == 1, "all know the first cause"
    assert said.pop().startswith("ranks 0, 7 did not write within 1 s of rank ")
    assert store.checked == SIZE
