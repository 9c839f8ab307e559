"""Functions run one after the other, on a thread that does not disturb training."""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from frontier_llm.checkpoint import job_thread
from frontier_llm.checkpoint.job_thread import JobThread
from tests.patience import patient, wait_until


def results(thread: JobThread, *functions: Callable[[], Any]) -> list[Any]:
    found: list[Any] = []
    for function in functions:
        thread.submit(lambda function=function: found.append(function()))
    assert thread.wait_below(1, patient(10))
    return found


def test_functions_run_in_order_on_one_thread() -> None:
    thread = JobThread("jobs")
    first = results(thread, lambda: 1, threading.get_ident, lambda: time.sleep(0.01), lambda: 2)
    assert first[::2] == [1, None]
    assert first[3] == 2
    assert results(thread, threading.get_ident) == [first[1]]
    assert not thread.is_busy


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_the_thread_has_a_lower_priority_than_training() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = niceness()
    assert results(JobThread("jobs"), niceness) == [min(own + 10, 19)]
    assert niceness() == own


def test_an_idle_thread_holds_no_memory() -> None:
    class States:
        pass

    states, thread = States(), JobThread("jobs")
    reference = weakref.ref(states)
    thread.submit(lambda states=states: None)
    del states
    assert thread.wait_below(1, patient(10))
    assert reference() is None


def test_an_idle_thread_ends_and_the_next_job_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_thread, "_IDLE_SECONDS", 0.01)
    thread = JobThread("short-lived")
    assert results(thread, lambda: 1) == [1]
    wait_until(lambda: "short-lived" not in [other.name for other in threading.enumerate()])
    assert results(thread, lambda: 2) == [2]


def test_a_wait_may_be_limited() -> None:
    thread, go = JobThread("jobs"), threading.Event()
    thread.submit(lambda: go.wait() and None)
    assert not thread.wait_below(1, 0.05)
    assert thread.is_busy
    go.set()
    assert thread.wait_below(1, patient(10))
