"""Kills at every point of a save, full and damaged disks: committed checkpoints stay readable."""

import os
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.discovery import newest
from frontier_llm.checkpoint.folders import MANIFEST
from frontier_llm.checkpoint.kill_points import VARIABLE
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.writer import Options
from frontier_llm.errors import CheckpointError
from tests.checkpoint.crew import PATIENCE, Outcome, impatience, run_crew
from tests.checkpoint.states import States, restore
from tests.conftest import mount
from tests.covering import exhaustive

pytestmark = pytest.mark.slow

SIZE = 4
SMALL = Options(chunk_bytes=4096)
EVERY_RANK = ("file.created", "file.half", "file.written", "file.synced", "reported")
"""Kill points that every rank reaches; only rank 0 reaches the others."""
COMMITTED = ("renamed", "concluded", "deleting")
"""Kill points at which the new checkpoint already exists."""
POINTS = (*EVERY_RANK, "manifest.half", "manifest.synced", "sealed", *COMMITTED)


def save_two(
    rank: int,
    size: int,
    store: Any,
    folder: Path,
    mode: Any,
    kill_at: str,
    keep: int = 2,
    timeout: timedelta = PATIENCE,
) -> list[str]:
    """Save step 1, then step 2 with a fault and a time limit; return the error messages."""
    states, wrong = States(tensor=2, data=2, rank=rank), []
    # create both first: after a kill the store may be lost, and no manager could be created
    managers = [
        CheckpointManager(folder, Ranks(rank, size, store, limit), mode, keep, SMALL)
        for limit in (PATIENCE, timeout)
    ]
    for step, manager in enumerate(managers, start=1):
        if step == 2 and kill_at:
            os.environ[VARIABLE] = kill_at
        states.advance(step)
        try:
            manager.begin(step, states.shards, {"step": step})
            manager.fence()
            states.advance(3)
            manager.close()
        except CheckpointError as error:
            wrong.append(str(error))
    return wrong


def resumed(folder: Path) -> int:
    """Load the newest checkpoint in another layout, check its states and return its step."""
    states = States()
    meta = restore(folder, states.shards)
    assert meta is not None
    assert not states.wrong(meta["step"])
    return int(meta["step"])


def save_again(folder: Path) -> None:
    """Check that the next attempt succeeds and removes what the crash left behind."""
    outcomes = run_crew(save_two, SIZE, folder, "lazy", "")
    assert not [o for o in outcomes if o.error or o.result], outcomes
    assert resumed(folder) == 2
    assert {path.name for path in folder.iterdir()} == {"step_00000001", "step_00000002"}


# If rank 0 is killed the store may survive, as a launcher can hold it.
FAULTS = [
    *((point, 0, store) for point in POINTS for store in ("tcp", "file")),
    # after it has reported, a rank is not needed
    *((point, 2, "tcp") for point in EVERY_RANK if point != "reported"),
]


COVERED = [
    fault for place, fault in enumerate(FAULTS) if fault[1:] != (0, "tcp") and place % 6 != 3
]
"""Each point always has the kill of rank 0 over TCP; a sixth have another rank's or store."""


@pytest.mark.parametrize(
    ("point", "rank", "store"),
    [*(fault for fault in FAULTS if fault not in COVERED), *exhaustive(*COVERED)],
)
def test_one_rank_is_killed(point: str, rank: int, store: str, tmp_path: Path) -> None:
    keep = 1 if point == "deleting" else 2
    # ranks that lose their store need no time limit to see it
    timeout = PATIENCE if (rank, store) == (0, "tcp") else impatience()
    outcomes = run_crew(
        save_two, SIZE, tmp_path, "lazy", f"{point}@{rank}", keep, timeout, store=store
    )
    assert [index for index, outcome in enumerate(outcomes) if outcome.killed] == [rank]
    if point in COMMITTED:
        assert resumed(tmp_path) == 2
    else:
        assert resumed(tmp_path) == 1
        for outcome in outcomes:
            if not outcome.killed:
                check_error_of(outcome, rank, store, timeout)
    save_again(tmp_path)


def check_error_of(outcome: Outcome, rank: int, store: str, timeout: timedelta) -> None:
    """Check that a surviving rank reports that the checkpoint failed, and why."""
    assert not outcome.error, outcome.error
    *earlier, message = outcome.result
    if earlier:  # rank 0 was killed before this rank got the outcome of step 1
        assert (rank, store) == (0, "tcp")
        assert "step 1 was not written: the ranks' store does not answer" in earlier[0]
    assert "the checkpoint of step 2 was not written: " in message
    if rank == 0 and store == "tcp":
        assert "store does not answer (is rank 0 gone?)" in message
    elif rank:
        assert f"rank {rank} did not write within {timeout.total_seconds():g} s" in message


@pytest.mark.parametrize("mode", ["lazy", pytest.param("blocking", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("point", EVERY_RANK)
def test_all_ranks_are_killed(point: str, mode: str, tmp_path: Path) -> None:
    outcomes = run_crew(save_two, SIZE, tmp_path, mode, point)
    assert all(outcome.killed for outcome in outcomes)
    assert resumed(tmp_path) == 1
    save_again(tmp_path)


def test_a_rank_killed_after_it_reported_does_not_fail_the_checkpoint(tmp_path: Path) -> None:
    outcomes = run_crew(save_two, SIZE, tmp_path, "lazy", "reported@2")
    assert [outcome.result for outcome in outcomes if not outcome.killed] == [[]] * 3
    assert resumed(tmp_path) == 2


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    outcomes = run_crew(save_two, SIZE, tmp_path, "blocking", "")
    assert not [o for o in outcomes if o.error or o.result], outcomes
    return tmp_path


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [truncate, remove])
def test_a_short_or_absent_file(
    damage: Callable[[Path], None], saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = saved / "step_00000002" / "rank_00003.safetensors"
    damage(file)
    assert resumed(saved) == 1
    assert f"{file} " in caplog.text


def test_a_missing_manifest(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    (saved / "step_00000002" / MANIFEST).unlink()
    assert resumed(saved) == 1
    assert f"{saved / 'step_00000002'} is no checkpoint" in caplog.text


@pytest.mark.parametrize("keep_bytes", [0, 100, -1])
def test_a_truncated_manifest(
    keep_bytes: int, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved / "step_00000002" / MANIFEST
    path.write_bytes(path.read_bytes()[:keep_bytes])
    assert resumed(saved) == 1
    assert f"{path} is damaged" in caplog.text


def test_a_changed_manifest(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved / "step_00000002" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"first":0', b'"first":1', 1))
    assert resumed(saved) == 1
    assert f"{path} is damaged: its digest does not match its content" in caplog.text


def test_a_manifest_of_another_format(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved / "step_00000002" / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2', 1))
    with pytest.raises(CheckpointError, match="is of format 2, this version of frontier_llm reads"):
        Manifest.load(path.parent)
    assert resumed(saved) == 1
    assert "format 2" in caplog.text


def test_only_damaged_checkpoints_are_an_error_and_no_checkpoint_is_not(
    saved: Path, tmp_path_factory: Any
) -> None:
    for step in (1, 2):
        (saved / f"step_{step:08d}" / MANIFEST).unlink()
    with pytest.raises(
        CheckpointError, match=r"every checkpoint of .* is damaged; the newest: .*step_00000002"
    ) as caught:
        newest(saved)
    advice = str(caught.value).partition("\n  do: ")[2]
    assert advice == "put an undamaged copy of one there, or use a new folder"
    assert newest(tmp_path_factory.mktemp("empty")) is None
    assert newest(saved / "absent") is None


def test_a_flipped_bit_is_detected_and_its_file_named(saved: Path) -> None:
    """The header is not needed to load states, so damage there is not detected."""
    folder = saved / "step_00000002"
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        content = bytearray(file.read_bytes())
        for place in (0, len(content) // 2, len(content) - 1):
            content[place] ^= 1
            file.write_bytes(content)
            states = States()
            if place == 0:  # the header is not read
                restore(saved, states.shards)
            else:
                with pytest.raises(CheckpointError, match=f"{file} is damaged: bytes"):
                    restore(saved, states.shards)
                restore(saved, states.shards, verify=False)
                assert states.wrong(2)
            content[place] ^= 1
            file.write_bytes(content)
    assert resumed(saved) == 2


def fill_disk(
    rank: int, size: int, store: Any, folder: Path, mode: Any, keep: int = 9
) -> list[str]:
    manager = CheckpointManager(folder, Ranks(rank, size, store, PATIENCE), mode, keep, SMALL)
    wrong, states = [], States(tensor=2, rank=rank)
    for step in range(1, 5):
        states.advance(step)
        try:
            manager.begin(step, states.shards, {"step": step})
            manager.fence()
            manager.close()
        except CheckpointError as error:
            wrong.append(f"{step}: {error}")
    return wrong


@pytest.mark.parametrize("mode", ["blocking", "lazy"])
@pytest.mark.parametrize(("keep", "fitting"), [(9, 2), (1, 1)])
def test_a_full_disk(mode: str, keep: int, fitting: int, small_disk: Path) -> None:
    """The only checkpoint that is to be kept stays until a newer one is committed, too."""
    other = small_disk / "other"
    other.write_bytes(bytes((2 - fitting) * 100 * 1024))
    outcomes = run_crew(fill_disk, 2, small_disk, mode, keep)
    other.unlink()
    assert outcomes[0].result == outcomes[1].result
    failed = [f"{step}:" for step in range(fitting + 1, 5)]
    assert [text[:2] for text in outcomes[0].result] == failed, outcomes
    for text in outcomes[0].result:
        assert "No space left on device" in text
        assert "with a lower checkpoint.keep" in text
    assert resumed(small_disk) == fitting
    left = sorted(path.name for path in small_disk.iterdir())
    wanted = ["step_00000001", "step_00000002"][:fitting]
    assert left == wanted, "failed checkpoints must take no space"


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder, "ro")
    try:
        outcomes = run_crew(fill_disk, 2, folder, "lazy")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    for outcome in outcomes:
        assert len(outcome.result) == 4
        assert all("Read-only file system" in text for text in outcome.result)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcomes = run_crew(fill_disk, 2, tmp_path / "file", "lazy")
    for outcome in outcomes:
        assert all("cannot be written: Not a directory" in text for text in outcome.result)
        assert len(outcome.result) == 4


def save_to_own_disk(rank: int, size: int, store: Any, folder: Path) -> list[str]:
    return fill_disk(rank, size, store, folder / f"node{rank}", "lazy")


def test_ranks_that_do_not_share_a_disk(tmp_path: Path) -> None:
    outcomes = run_crew(save_to_own_disk, 2, tmp_path)
    for outcome in outcomes:
        assert len(outcome.result) == 4
        for text in outcome.result:
            assert "rank_00001.safetensors is not there" in text
            assert "run.dir must be on a file system that all nodes share" in text


def save_and_read(rank: int, size: int, store: Any, folder: Path) -> Any:
    """Rank 0 saves steps while rank 1 repeatedly loads the newest, until that has seen several."""
    if rank == 0:
        # a slow reader would find that the steps it reads are deleted
        manager = CheckpointManager(folder, Ranks(0, 1, store, PATIENCE), "lazy", 10**6, SMALL)
        states, step = States(repeat=3), 0
        while step < 10 or store.add("seen", 0) < 5:
            step += 1
            states.advance(step)
            manager.begin(step, states.shards, {"step": step})
            manager.fence()
        manager.close()
        store.set("over", "")
        return None
    seen = []
    while not store.check(["over"]):
        states = States(repeat=3)
        meta = restore(folder, states.shards)
        if meta is not None:
            assert not states.wrong(meta["step"])
            if meta["step"] not in seen:
                store.add("seen", 1)
            seen.append(meta["step"])
    return seen


def test_reading_while_another_process_writes(tmp_path: Path) -> None:
    outcomes = run_crew(save_and_read, 2, tmp_path)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    seen = outcomes[1].result
    assert len(set(seen)) >= 5
    assert seen == sorted(seen)
