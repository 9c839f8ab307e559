"""Ranks that communicate over gloo do not interrupt each other's threads."""

import os
from pathlib import Path

import pytest

from frontier_llm.launch.rendezvous import run_as_batch_work
from tests.ranks import run_ranks


def policies(world) -> set[int]:
    """Return the policies of all threads of a rank, those of gloo among them."""
    return {os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has this policy")
def test_threads_of_a_rank_are_batch_work():
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    for found in run_ranks(policies, 2):
        assert os.SCHED_BATCH in found


def test_a_machine_without_the_policy_goes_on(monkeypatch):
    monkeypatch.delattr(os, "SCHED_BATCH", raising=False)
    run_as_batch_work()
