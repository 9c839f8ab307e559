"""Checkpoints that wait for the archive when a rank dies are archived all the same."""

from pathlib import Path

import psutil
import pytest

from tests.forked_train import Training
from tests.recovery.test_replaced_ranks import (
    REPLACES,
    WAITS,
    corpus,
    end,
    go_on,
    hold,
    process_of,
    wait_for_step,
    watched,
)

pytestmark = pytest.mark.slow
__all__ = ["corpus", "watched"]  # fixtures


def test_a_waiting_archive_outlives_the_death_of_a_rank(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    run, copies, ready = tmp_path / "run", tmp_path / "archive", tmp_path / "ready"
    copies.mkdir()
    command = f"until test -e {ready}; do sleep 0.05; done; cp -r $CHECKPOINT {copies}"
    hold(run, 5)
    training = Training(
        *corpus, *REPLACES, WAITS, f"run.dir={run}", "checkpoint.every_steps=3",
        "checkpoint.keep=1", f"checkpoint.tiers.archive.command='{command}'",
    )  # fmt: skip
    wait_for_step(run, 5)
    process_of(run, 1).kill()
    go_on(run, 5)
    wait_for_step(run, 11)
    ready.touch()
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    found = sorted(path.name for path in copies.iterdir())
    assert found == [f"step_{step:08d}" for step in (3, 6, 9, 12)]
