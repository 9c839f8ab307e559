"""A new checkpoint overwrites the files of an old one, unless somebody could notice it."""

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from frontier_llm.checkpoint import spare_files
from frontier_llm.checkpoint.folders import MANIFEST
from frontier_llm.checkpoint.kill_points import VARIABLE
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manager_options import Options
from frontier_llm.checkpoint.spare_files import SPARE, keep_spare, remove_spare, take_spare
from tests.checkpoint.crew import IMPATIENCE, PATIENCE, run_crew
from tests.checkpoint.states import States, restore

FILE = "rank_00000.safetensors"


@pytest.fixture(autouse=True)
def _leases(tmp_path: Path) -> None:
    """Skip where the file system may be shared or has no leases, so that nothing is reused."""
    (tmp_path / "probe").write_text("")
    if not (spare_files._is_local(tmp_path) and spare_files._is_unused(tmp_path / "probe")):
        pytest.skip("the file system of the tests is not a local one with leases")
    (tmp_path / "probe").unlink()


class Run:
    """Checkpoints of one rank, of which one is kept."""

    def __init__(self, folder: Path, repeat: int = 1) -> None:
        self.folder, self._states = folder, States(repeat=repeat)
        self._manager = CheckpointManager(
            folder, 0, 1, dist.HashStore(), "blocking", 1, PATIENCE, Options(chunk_bytes=4096)
        )

    def save(self, *steps: int) -> None:
        for step in steps:
            self._states.advance(step)
            self._manager.begin(step, self._states.shards, {"step": step})

    def file(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}" / FILE

    def close(self) -> None:
        self._manager.close()
        remove_spare(self.folder)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def test_the_file_of_the_deleted_checkpoint_is_overwritten(run: Run) -> None:
    inodes = {}
    for step in (1, 2, 3, 4, 5):
        run.save(step)
        inodes[step] = run.file(step).stat().st_ino
        states = States()
        assert restore(run.folder, states.shards) == {"step": step}
        assert not states.wrong(step)
    assert inodes[3] == inodes[1] == inodes[5]
    assert inodes[4] == inodes[2] != inodes[1]


def test_the_spare_folder_is_no_checkpoint_and_is_deleted_at_the_end(run: Run) -> None:
    run.save(1, 2)
    assert {path.name for path in run.folder.iterdir()} == {"step_00000002", SPARE}
    assert [path.name for path in (run.folder / SPARE).iterdir()] == [FILE]
    run.close()
    assert [path.name for path in run.folder.iterdir()] == ["step_00000002"]


def linked(stack: ExitStack, file: Path) -> Callable[[], bytes]:
    link = file.parents[1] / "backup"
    link.hardlink_to(file)
    stack.callback(link.unlink)
    return link.read_bytes


def opened(stack: ExitStack, file: Path) -> Callable[[], bytes]:
    stream = stack.enter_context(file.open("rb"))
    return lambda: os.pread(stream.fileno(), file_size, 0)


file_size = 1 << 30
"""More than the file has."""


@pytest.mark.parametrize("use", [linked, opened])
def test_a_file_in_use_is_not_overwritten(
    use: Callable[[ExitStack, Path], Callable[[], bytes]], run: Run
) -> None:
    run.save(1)
    content = run.file(1).read_bytes()
    with ExitStack() as stack:
        read = use(stack, run.file(1))
        run.save(2, 3, 4)
        assert read() == content


def test_a_file_of_another_size_is_not_overwritten(run: Run) -> None:
    run.save(1, 2)
    spare = run.folder / SPARE / FILE
    size = spare.stat().st_size
    assert not take_spare(run.folder / "step_00000003.partial" / FILE, size - 1)
    assert not spare.exists()


def test_files_that_ranks_write_together_are_not_kept(tmp_path: Path) -> None:
    """No rank would take them, so that the disk would need more room."""
    options = Options(chunk_bytes=4096, file_ranks=range(1))
    manager = CheckpointManager(tmp_path, 0, 1, dist.HashStore(), "blocking", 1, PATIENCE, options)
    states = States()
    for step in (1, 2, 3):
        states.advance(step)
        manager.begin(step, states.shards, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_threads_that_keep_spare_folders_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    for first in range(1, 60, 3):
        run.save(first)
        saved = tmp_path / f"step_{first:08d}"
        shutil.copytree(saved, tmp_path / f"step_{first + 1:08d}")
        paths = [saved, tmp_path / f"step_{first + 1:08d}"]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(keep_spare, paths))
        assert True in found
    run.close()


def test_a_rank_takes_no_file_before_the_deletion_is_on_disk(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure must not bring back a checkpoint whose files are overwritten."""
    names: list[set[str]] = []
    sync = spare_files.sync_folder

    def watched(folder: Path) -> None:
        names.append({path.name for path in folder.iterdir()})
        sync(folder)

    monkeypatch.setattr(spare_files, "sync_folder", watched)
    run.save(1, 2)
    assert names == [{"step_00000001.deleting", "step_00000002"}]


def test_a_file_system_that_nodes_may_share_keeps_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_files, "LOCAL", ("lustre",))
    run.save(1, 2, 3)
    assert [path.name for path in run.folder.iterdir()] == ["step_00000003"]


def test_without_leases_nothing_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    control = fcntl.fcntl

    def refused(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    run.save(1, 2, 3)
    assert [path.name for path in run.folder.iterdir()] == ["step_00000003"]


def take_while_others_open(rank: int, _: int, store: Any, folder: Path) -> int:
    """Ask rank 0's leases while rank 1 opens the file; return how many were refused."""
    file, refused = folder / "file", 0
    if rank == 1:
        while not store.check(["end"]):
            for _ in range(100):
                os.close(os.open(file, os.O_RDONLY))
        return 0
    for _ in range(20_000):
        refused += not spare_files._is_unused(file)
    store.set("end", "")
    return refused


def test_a_process_that_opens_a_file_meanwhile_harms_nobody(tmp_path: Path) -> None:
    """The kernel signals the owner of a lease; the default signal would end the process."""
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL
    (tmp_path / "file").write_bytes(b"x")
    found, other = run_crew(take_while_others_open, 2, tmp_path)
    assert not found.error
    assert (found.code, other.code) == (0, 0)
    assert found.result > 0, "the other process never had the file open"


def save_three(rank: int, size: int, store: Any, folder: Path, kill_at: str) -> None:
    """Save three steps and keep one; a process is killed while it overwrites the first."""
    states, keep, small = States(tensor=2, rank=rank), 1, Options(chunk_bytes=4096)
    manager = CheckpointManager(folder, rank, size, store, "lazy", keep, IMPATIENCE, small)
    for step in (1, 2, 3):
        if step == 3:
            assert (folder / SPARE / f"rank_{rank:05d}.safetensors").exists()
            os.environ[VARIABLE] = kill_at
        states.advance(step)
        manager.begin(step, states.shards, {"step": step})
        manager.fence()
        manager.wait()
        store.set(f"{step}/{rank}", "")
        store.wait([f"{step}/{other}" for other in range(size)])


@pytest.mark.slow
@pytest.mark.parametrize("point", ["file.created", "file.half", "file.written", "file.synced"])
def test_a_kill_while_a_file_is_overwritten_loses_nothing(point: str, tmp_path: Path) -> None:
    outcomes = run_crew(save_three, 2, tmp_path, point)
    assert all(outcome.killed for outcome in outcomes), outcomes
    assert (tmp_path / "step_00000003.partial" / FILE).exists()
    states = States()
    assert restore(tmp_path, states.shards) == {"step": 2}
    assert not states.wrong(2)
    run = Run(tmp_path)
    run.save(3)
    run.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    assert restore(tmp_path, states.shards) == {"step": 3}
    assert not states.wrong(3)


def test_a_kill_between_renaming_and_deleting_is_harmless(tmp_path: Path) -> None:
    """The spare folder then has a manifest; it is no checkpoint all the same."""
    run = Run(tmp_path)
    run.save(1)
    (tmp_path / "step_00000001").rename(tmp_path / SPARE)
    assert restore(tmp_path, States().shards) is None
    run.save(2, 3)
    assert not (tmp_path / SPARE / MANIFEST).exists()
    run.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_a_file_that_another_rank_has_taken_is_no_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    assert keep_spare(tmp_path / "step_00000001")
    path = tmp_path / "step_00000002.partial" / FILE
    size = (tmp_path / SPARE / FILE).stat().st_size
    assert take_spare(path, size)
    assert not take_spare(path.with_name("other"), size)
    run.save(2)
    run.close()
