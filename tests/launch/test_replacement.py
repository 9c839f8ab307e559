"""Processes of this machine that hold ranks, and are replaced or end."""

from pathlib import Path

import pytest

from frontier_llm.errors import RankFailure
from frontier_llm.launch import membership as membership_module
from frontier_llm.launch.coordinator import Replacing
from frontier_llm.launch.launcher import LaunchOptions
from frontier_llm.launch.membership import Membership
from frontier_llm.launch.replacement import launch_replacing


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
    assert launch_replacing(lose_contact, options, replacing).exit_code == 1
