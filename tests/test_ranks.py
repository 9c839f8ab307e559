"""The helper of multi-process tests shows the cause of a failure and never hangs."""

import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailedError, in_turn, run_ranks


def _sum(world, value):
    tensor = torch.tensor([float(value + world.rank)])
    dist.all_reduce(tensor)
    return tensor.item(), world.rank // world.ranks_per_node


def test_every_rank_returns_its_result():
    assert run_ranks(_sum, 4, 1, ranks_per_node=2) == [(10.0, 0), (10.0, 0), (10.0, 1), (10.0, 1)]


def _fail(world):
    if world.rank == 1:
        raise ValueError("rank one is broken")
    dist.barrier()


def test_the_cause_comes_before_its_consequences():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_fail, 3)
    text = str(caught.value)
    assert text.index("rank one is broken") < text.index("--- rank 0")


def _die(world):
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_killed_rank_ends_the_others():
    with pytest.raises(RanksFailedError, match=r"rank 2: ended with -9") as caught:
        run_ranks(_die, 3)
    assert "did not end" not in str(caught.value), "the time limit ended the others"


def test_a_hang_ends_at_the_time_limit():
    with pytest.raises(RanksFailedError, match="did not end"):
        run_ranks(lambda world: signal.pause(), 2, timeout=0.2)


def _sum_in_two_groups(world, value):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensor = torch.tensor([float(value)])
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor.item(), [id(group) for group in groups]


def test_cases_run_in_turn_on_groups_that_are_created_once():
    for results in run_ranks(in_turn, 2, _sum_in_two_groups, [(1,), (2,), (3,)]):
        sums, groups = zip(*results, strict=True)
        assert sums == (4.0, 8.0, 12.0)
        assert groups[0] == groups[1] == groups[2]
        assert groups[0][0] != groups[0][1]


class _Left:
    """Garbage of a process that only this process can destroy, as a process group with threads."""

    def __init__(self) -> None:
        self.itself = self
        self.process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(13)


def test_a_forked_process_destroys_no_garbage_of_its_parent():
    gc.disable()
    try:
        _Left()
        pid = os.fork()
        if not pid:
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        gc.enable()
