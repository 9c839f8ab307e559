"""Processes that their parent kills."""

import os
import signal
import time

import pytest

from frontier_llm.launch import forked_ranks
from frontier_llm.launch.forked_ranks import ForkedRanks


def sleep() -> int:
    time.sleep(60)
    return 0


def test_a_process_that_does_not_die_counts_as_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forked_ranks, "_DEATH_SECONDS", 0.2)
    ranks = ForkedRanks()
    ranks.fork(0, sleep)
    pid = ranks.running[0]
    try:
        with monkeypatch.context() as patch:  # the kernel cannot end a process in state D
            patch.setattr(os, "kill", lambda pid, number: None)
            ranks.kill()
        assert ranks.ended[0][0] == -signal.SIGKILL
        assert f"process {pid} was killed 0.2 s ago and still exists" in caplog.text
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
