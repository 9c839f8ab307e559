"""Ranks that communicate over gloo do not interrupt each other's threads."""

import os
import threading
from pathlib import Path

import pytest

from frontier_llm.launch.rendezvous import run_as_batch_work
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="Linux alone has this policy"
)


def policies_of_gloo(world) -> list[int]:
    """Return the policy of each thread of gloo."""
    tasks = list(Path("/proc/self/task").iterdir())
    names = [(task / "comm").read_text() for task in tasks]
    found = [int(t.name) for t, name in zip(tasks, names, strict=True) if name.startswith("gloo")]
    return list(map(os.sched_getscheduler, found))


def test_threads_of_gloo_are_batch_work():
    for found in run_ranks(policies_of_gloo, 2):
        assert found
        assert set(found) == {os.SCHED_BATCH}


@pytest.mark.forked
def test_new_threads_are_batch_work_where_there_is_such_a_policy(monkeypatch):
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with monkeypatch.context() as without:
        without.delattr(os, "SCHED_BATCH")
        run_as_batch_work()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    run_as_batch_work()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]
