"""A disk that does not answer for longer than a network timeout ends neither a run nor a copy."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked_train import TINY, Training

STALL_SECONDS = 14.0
"""Longer than the kernel waits for a peer that is gone."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system that can be frozen."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    for command in (
        ["truncate", "-s", "800M", str(image)],
        ["mkfs.ext4", "-q", "-F", str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def freeze(disk: Path, done: list[bool]) -> None:
    """Freeze a disk while a copy of the next node is being written to it."""
    while not list(disk.glob("ckpt/*/copy_of_node_*/*.partial")):
        time.sleep(0.01)
    subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
    time.sleep(STALL_SECONDS)
    subprocess.run(["fsfreeze", "-u", str(disk)], check=True)
    done.append(True)


@pytest.mark.exhaustive
def test_a_run_outlives_a_stall_of_a_disk(tmp_path: Path, disk: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 300)
    keys = (
        *TINY, f"data.path={tmp_path}/text.txt", f"run.dir={tmp_path}/run", "launch.ranks=2",
        "launch.ranks_per_node=1", "trainer.steps=40", "model.hidden=512", "model.layers=3",
        "sharding=replicated", "checkpoint.every_steps=1000", "checkpoint.partner=true",
        f"checkpoint.tiers.local.path={disk}/ckpt", "checkpoint.tiers.local.every_steps=4",
    )  # fmt: skip
    done: list[bool] = []
    training = Training(*keys)
    thread = threading.Thread(target=freeze, args=(disk, done), daemon=True)
    thread.start()
    ended = training.wait(180)
    assert ended.code == 0, ended.text
    assert done
    log = (tmp_path / "run" / "run.log").read_text()
    assert "is not copied to the next node: " not in log.replace("next node: step", "")
    assert "is copied to the next node: 1" in log, "the copy that was stalled"
