"""What preflight and diagnosis say while a communicator waits for a rank that never joins.

The ranks use the backend of nccl_like.py, which starts as NCCL does.
"""

import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from frontier_llm.config import decode
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError
from frontier_llm.health.diagnosis import (
    Phase,
    RankState,
    explain_stall,
    last_collective,
    late_ranks,
    unstarted_collective,
)
from frontier_llm.health.preflight import check_all_ranks, check_groups, collective_trial
from frontier_llm.launch.rendezvous import init_process_group
from frontier_llm.launch.world import World
from frontier_llm.parallel.groups import abort_groups
from frontier_llm.units import format_seconds
from tests.health import nccl_like
from tests.kept_store import kept_store
from tests.patience import patient
from tests.ranks import run_ranks
from tests.values import tiny_values

CONFIG = decode(tiny_values("run.dir=runs/the_same"))
CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run ranks whose groups are those of `nccl_like`, and whose store is that of a job."""
    nccl_like.register()
    monkeypatch.setattr(nccl_like, "FOLDER", tmp_path)

    def run(work, size):
        def rank(world):
            dist.destroy_process_group()  # the one of gloo
            client = dist.TCPStore("127.0.0.1", port, timeout=MINUTE)
            store = dist.PrefixStore("job", client)
            init_process_group(world, store, nccl_like.NAME, MINUTE)
            result = work(world, store)
            client = client.clone()  # a thread may wait on the first connection
            client.add("ended", 1)
            while client.add("ended", 0) < size:
                time.sleep(0.01)  # a process that ends would be a dead rank
            abort_groups()
            return result

        return run_ranks(rank, size)

    with kept_store() as port:
        yield run


@pytest.mark.parametrize("absent", [2, 3], ids=["for the identifier", "for the members"])
def test_preflight_names_the_rank_that_a_blocked_thread_waits_for(ranks, absent):
    limit, waiting = round(patient(0.25), 1), 5 - absent

    def work(world, store):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        check_all_ranks(CONFIG, 1, world, store, Accelerator.of_rank(0))
        tensor = collective_trial("tensor", halves[world.rank // 2])
        early = [collective_trial("whole", dist.group.WORLD), *[tensor] * (world.rank < 2)]
        check_groups(early, world, store, CPU, MINUTE)
        late = [tensor] * (world.rank == waiting)
        try:
            check_groups(late, world, store, CPU, timedelta(seconds=limit))
        except LaunchError as error:
            return str(error)
        return ""

    messages = ranks(work, 4)
    assert messages[waiting].startswith(
        "preflight: the tensor group of ranks 2, 3 did not exchange its first messages within "
        f"{format_seconds(limit)} ("
    )
    assert f"absent: rank {absent} on node0 (at: whole)" in messages[waiting]
    assert [text for rank, text in enumerate(messages) if rank != waiting] == ["", "", ""]


@pytest.mark.parametrize("call", [dist.all_reduce, partial(dist.irecv, src=1)])
def test_a_rank_that_creates_a_communicator_is_not_late(ranks, call):
    def work(world, store):
        inherited = last_collective()  # of an earlier test in the process that was forked
        pair = dist.new_group([0, 1], group_desc="pair")
        if world.rank == 0:
            creating = partial(call, torch.ones(1), group=pair)
            threading.Thread(target=creating, daemon=True).start()
            while unstarted_collective() is None:
                time.sleep(0.01)
        state = RankState.now(world, Phase("step", 1, time.monotonic(), 40.0))
        abort_groups()  # does not reach the thread
        if state.collective == inherited:
            state = replace(state, collective=None)
        return state, unstarted_collective()

    states, later = map(list, zip(*ranks(work, 2), strict=True))
    states = dict(enumerate(states))
    assert later == [None, None]
    assert states[1].collective is None
    assert late_ranks(states, 2) == [1]
    name = getattr(call, "func", call).__name__
    world = World(0, 2, 0, 2, "a", "slurm", "a", 1, "job", ("a", "b"))
    text = explain_stall(states, world, Phase("step", 1, 0.0, 40.0), "stall.txt")
    assert f"rank 0: step; waiting in the start of {name} in group pair [0, 1] (NCCL" in text


def test_a_collective_that_has_started_is_read_from_the_record(tmp_path):
    def work(world):
        if world.rank == 0:
            threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), daemon=True).start()
            while last_collective() is None or unstarted_collective() is not None:
                time.sleep(0.01)
            recorded = last_collective()
            (tmp_path / "seen").touch()
            return recorded.is_waiting, recorded.has_started
        while not (tmp_path / "seen").exists():
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
        return None

    assert run_ranks(work, 2)[0] == (True, True)
