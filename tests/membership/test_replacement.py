"""Processes of this machine that hold ranks, and are replaced or end."""

import os
import resource
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from frontier_llm.errors import LaunchError, RankFailure
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.membership import launcher
from frontier_llm.membership import member as membership_module
from frontier_llm.membership.coordinator import Replacing
from frontier_llm.membership.launcher import launch
from frontier_llm.membership.member import Membership


def lose_contact(membership: Membership) -> None:
    """Lose contact in every generation in which the process trains."""
    while (place := membership.next_place()) is not None:
        if place.former_size:
            membership.report_done()
        else:
            assert membership.outlives(RankFailure())
        membership.leave()


def test_ranks_that_only_lose_contact_end_the_run_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "_NEWS_SECONDS", 0.2)
    options = LaunchOptions(ranks=2, failure_dir=tmp_path / "failures")
    replacing = Replacing(tmp_path, 0, 1, 3.0, lambda: 0)
    assert launch(lose_contact, options, replacing).exit_code == 1


def train_for_ever(membership: Membership) -> None:
    """Hold a rank until this process is killed."""
    membership.next_place()
    time.sleep(1e6)


def test_a_killed_store_ends_the_run_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_store = launcher.keep_store

    def keep_store_for_a_while(server: socket.socket) -> int:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return keep_store(server)

    monkeypatch.setattr(launcher, "keep_store", keep_store_for_a_while)
    options = LaunchOptions(ranks=2, failure_dir=tmp_path / "failures")
    with pytest.raises(LaunchError, match=r"store of the ranks was killed by SIGKILL"):
        launch(train_for_ever, options, Replacing(tmp_path, 0, 1, 3.0, lambda: 0))


def test_a_store_that_is_killed_at_the_start_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "keep_store", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    hour = timedelta(hours=1)
    options = LaunchOptions(ranks=2, failure_dir=tmp_path / "failures", store_timeout=hour)
    with pytest.raises(LaunchError, match=r"store of the ranks was killed by SIGKILL"):
        launch(train_for_ever, options)


def test_the_store_may_open_a_file_for_each_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    options = LaunchOptions(ranks=2, failure_dir=tmp_path / "failures")
    with pytest.raises(LaunchError, match="may open 64 files"):
        launch(train_for_ever, options, Replacing(tmp_path, 0, 1, 3.0, lambda: 0))
