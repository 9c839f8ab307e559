"""A run whose run directory hangs ends, with its last step on the disks of the nodes."""

import fcntl
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontier_llm.checkpoint.drain import DrainSource
from frontier_llm.saving.run_directory import LOCK
from frontier_llm.units import format_seconds
from tests.conftest import mount
from tests.covering import covering
from tests.forked_train import train
from tests.patience import patient, wait_until
from tests.saving.test_drain import direct, events, files, losses, nodes, tiny

pytestmark = pytest.mark.slow
__all__ = ["direct", "tiny"]  # fixtures


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system in the folder of the checkpoints, in which every write hangs.

    A process that waits for it cannot be killed before the file system is thawed.
    """
    folder, image = tmp_path / "run" / "checkpoints", tmp_path / "image"
    folder.mkdir(parents=True)
    with image.open("wb") as stream:
        stream.truncate(64 * 2**20)
    for command in (
        ("mkfs.ext4", "-q", str(image)),
        ("mount", "-o", "loop", str(image), str(folder)),
        ("fsfreeze", "--freeze", str(folder)),
    ):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a file system can be frozen by root only: {error}")
    yield folder
    thaw(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)


def thaw(folder: Path) -> None:
    subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=False, capture_output=True)


def is_locked(run: Path) -> bool:
    with (run / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("steps", covering([8, 7], [7]))
def test_a_run_directory_that_hangs_does_not_keep_the_run_from_ending(
    steps: int, tiny: tuple[str, ...], direct: Path, tmp_path: Path, frozen: Path
) -> None:
    """At step 4 a drain hangs. The last step is written directly, and hangs, too.

    Each node has copied the last step of the other one.
    """
    more = ("optimizer.decay_steps=8", f"trainer.steps={steps}", "checkpoint.partner=true")
    limit = round(patient(0.5), 1)
    said = f"within {format_seconds(limit)} (checkpoint.end_seconds)"
    ended = train(*tiny, *nodes(tmp_path, f"checkpoint.end_seconds={limit}"), *more)
    assert ended.code == 1, ended.text
    assert f"did not take step {steps} {said}" in ended.text
    assert "this job has written no step there" in ended.text
    assert f"step {steps} is on the disks of the nodes, in {tmp_path}/local/run-" in ended.text
    assert f"start on the same nodes with run.dir={tmp_path}/run" in ended.text
    assert losses(tmp_path / "run") == losses(direct)[:steps]
    found = sorted(p.parent.name for p in (tmp_path / "local").glob(f"*/*/step_{steps:08d}"))
    assert found == ["copy_of_node_00000", "copy_of_node_00001", "node_00000", "node_00001"]

    thaw(frozen)
    wait_until(lambda: not is_locked(tmp_path / "run"), "the end of the threads that hung")
    goes_on = ("optimizer.decay_steps=8", "trainer.steps=8")
    ended = train(*tiny, *nodes(tmp_path), *goes_on)
    assert ended.code == 0, ended.text
    assert events(tmp_path / "run", "resume")[-1]["step"] == steps
    assert f"step {steps} is copied to the run directory" in ended.text
    last = files(frozen / "step_00000008")
    assert last == files(direct / "checkpoints" / "step_00000008")
    assert losses(tmp_path / "run") == losses(direct)


@pytest.mark.exhaustive
def test_a_drain_that_hangs_costs_nothing_if_the_last_step_is_written(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrainSource, "chunks", lambda _: threading.Event().wait())
    limit = f"checkpoint.end_seconds={patient(1)}"
    ended = train(*tiny, *nodes(tmp_path, limit), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert "checkpoints before step 8 are not copied to" in ended.text
    last = files(tmp_path / "run" / "checkpoints" / "step_00000008")
    assert last == files(direct / "checkpoints" / "step_00000008")


def test_a_full_run_directory_at_the_end_is_named(tiny: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount(folder, "size=64k")
    try:
        ended = train(*tiny, *nodes(tmp_path), "trainer.steps=3")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    assert ended.code == 1, ended.text
    assert "could not take step 3 (the checkpoint of step 3 was not written" in ended.text
    assert "No space left on device" in ended.text
    assert "step 3 is on the disks of the nodes" in ended.text


def test_a_run_that_resumes_after_its_last_step_ends_at_once(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    two = "launch.ranks=2", "launch.ranks_per_node=1"
    for steps in (3, 2):
        ended = train(*tiny, *nodes(tmp_path), *two, f"trainer.steps={steps}")
        assert ended.code == 0, ended.text
        assert ("set trainer.steps above 3" in ended.text) == (steps < 3)
        assert "the disks of the nodes" not in ended.text
        shutil.rmtree(tmp_path / "local", ignore_errors=True)  # only the run directory has the step
    assert events(tmp_path / "run", "resume")[-1]["step"] == 3
