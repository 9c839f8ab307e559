"""The view of a process that can hold a rank, with a real store."""

import time
from pathlib import Path

from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from frontier_llm.launch.launcher import LaunchOptions, local_world
from frontier_llm.launch.membership import Membership


def test_the_thread_that_waits_for_rosters_does_not_read_them(tmp_path: Path) -> None:
    keys = HashStore()
    options = LaunchOptions(ranks=2, failure_dir=tmp_path)
    Membership(1, lambda rank: local_world(rank, options, 1), lambda: keys, PrefixStore, 1)
    for generation in range(2):
        keys.set(f"members/roster/{generation}", "not a roster")
        deadline = time.monotonic() + 10
        while not keys.check([f"members/seen/{generation}/1"]):
            assert time.monotonic() < deadline, "the thread has ended"
            time.sleep(0.01)
