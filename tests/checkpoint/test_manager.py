"""Saving while training continues: a checkpoint holds the states of its step."""

import json
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from frontier_llm.checkpoint import manager as manager_module
from frontier_llm.checkpoint import rank_file, save
from frontier_llm.checkpoint.chunk_pool import SharedPool
from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.discovery import newest
from frontier_llm.checkpoint.folders import MANIFEST
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.writer import Options
from frontier_llm.errors import CheckpointError
from tests.checkpoint.crew import PATIENCE, run_crew
from tests.checkpoint.states import MODEL, States, restore, value

SMALL = Options(chunk_bytes=4096)


def single_rank_manager(
    folder: Path, mode: Any = "lazy", options: Options = SMALL
) -> CheckpointManager:
    return CheckpointManager(folder, Ranks(0, 1, dist.HashStore(), PATIENCE), mode, 2, options)


def saved_states(folder: Path, step: int) -> list[str]:
    states = States()
    assert restore(folder, states.shards) is not None
    return states.wrong(step)


class Clock:
    """The clock by which a manager measures its stalls; time only passes when a test says so."""

    def __init__(self) -> None:
        self._now, self._was_read = 0.0, threading.Event()

    def monotonic(self) -> float:
        now = self._now  # before time passes in the other thread
        if threading.current_thread() is threading.main_thread():  # not a thread that saves
            self._was_read.set()
        return now

    def release_after_five_seconds(self, disk: threading.Semaphore) -> None:
        """Once a stall has begun, let five seconds pass before the disk writes."""
        self._was_read.clear()

        def release() -> None:
            self._was_read.wait()
            self._now += 5
            disk.release(1000)

        threading.Thread(target=release, daemon=True).start()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(manager_module, "time", clock)
    return clock


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Block each write of a chunk until the test releases it."""
    permits = threading.Semaphore(0)
    write = rank_file.RankFile.write

    def slow(self: rank_file.RankFile, buffer: torch.Tensor, size: int) -> None:
        permits.acquire()
        write(self, buffer, size)

    monkeypatch.setattr(rank_file.RankFile, "write", slow)
    yield permits
    permits.release(1000)


@pytest.mark.parametrize("mode", ["blocking", "lazy"])
@pytest.mark.parametrize("chunk_bytes", [4096, 3 * 4096, 1 << 24])
def test_saved_states_and_meta_are_restored(mode: str, chunk_bytes: int, tmp_path: Path) -> None:
    manager = single_rank_manager(tmp_path, mode, Options(chunk_bytes=chunk_bytes))
    states = States()
    meta = {"samples": 96, "scale": 65536.0, "rng": {"seed": 1, "list": [1, 2]}}
    for step in (3, 4):
        states.advance(step)
        manager.begin(step, states.shards, meta)
        manager.fence()
    manager.close()
    states.advance(9)
    assert restore(tmp_path, states.shards) == meta
    assert not states.wrong(4)


@pytest.mark.parametrize("written", [0, 1, 5])
def test_states_may_change_right_after_the_fence(
    written: int, tmp_path: Path, slow_disk: threading.Semaphore
) -> None:
    manager, states = single_rank_manager(tmp_path), States()
    states.advance(1)
    manager.begin(1, states.shards, {})
    for _ in range(written):
        slow_disk.release()
    manager.fence()
    states.advance(2)
    slow_disk.release(1000)
    manager.close()
    assert not saved_states(tmp_path, 1)


def test_many_steps_without_a_pause(tmp_path: Path) -> None:
    manager, states = single_rank_manager(tmp_path), States(repeat=5)
    for step in range(1, 30):
        states.advance(step)
        manager.begin(step, states.shards, {"step": step})
        manager.fence()
        for run, *_ in states.views():
            run[:] = np.nan
        if step % 7 == 0:
            manager.close()
            states = States(repeat=5)
            assert restore(tmp_path, states.shards) == {"step": step}
            assert not states.wrong(step)


def test_a_small_pool_makes_the_fence_wait(
    tmp_path: Path, slow_disk: threading.Semaphore, clock: Clock
) -> None:
    """With two chunks of host memory the fence must wait until the other chunks are written."""
    manager, states = (
        single_rank_manager(tmp_path, options=Options(pool_bytes=8192, chunk_bytes=4096)),
        States(),
    )
    states.advance(1)
    manager.begin(1, states.shards, {})
    assert manager.take_stall_seconds() == 0
    clock.release_after_five_seconds(slow_disk)
    manager.fence()
    assert manager.take_stall_seconds() == 5
    states.advance(2)
    manager.close()
    assert not saved_states(tmp_path, 1)


def test_the_fence_does_not_wait_for_the_disk(
    tmp_path: Path, slow_disk: threading.Semaphore
) -> None:
    manager, states = single_rank_manager(tmp_path), States()
    manager.begin(1, states.shards, {})
    manager.fence()  # no chunk can be written: waiting for the disk would hang
    assert newest(tmp_path) is None
    slow_disk.release(1000)
    manager.close()
    assert newest(tmp_path).step == 1


def test_begin_waits_for_the_previous_checkpoint(
    tmp_path: Path, slow_disk: threading.Semaphore, clock: Clock
) -> None:
    manager, states = single_rank_manager(tmp_path), States()
    states.advance(1)
    manager.begin(1, states.shards, {})
    manager.fence()
    assert manager.take_stall_seconds() == 0
    clock.release_after_five_seconds(slow_disk)
    states.advance(2)
    manager.begin(2, states.shards, {})
    assert manager.take_stall_seconds() == 5
    assert manager.take_stall_seconds() == 0, "stalls are counted once"
    manager.close()
    assert not saved_states(tmp_path, 2)


def test_a_wait_for_the_first_checkpoint_names_no_earlier_one(
    tmp_path: Path,
    slow_disk: threading.Semaphore,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = single_rank_manager(tmp_path)
    manager.begin(1, States().shards, {})
    manager.fence()
    clock.release_after_five_seconds(slow_disk)
    with caplog.at_level(logging.INFO):
        manager.close()
    (waited,) = [line for line in caplog.messages if "training waited" in line]
    assert waited.endswith("for a checkpoint: until it is written")


def test_several_snapshots_share_the_pool(tmp_path: Path, slow_disk: threading.Semaphore) -> None:
    pool = SharedPool(100, 4096, torch.device("cpu"))
    options = Options(chunk_bytes=4096, pool=pool, in_flight=8)
    manager, states = single_rank_manager(tmp_path, options=options), States()
    for step in (1, 2, 3):
        states.advance(step)
        manager.begin(step, states.shards, {})
        manager.fence()  # no chunk can be written: waiting for the disk would hang
    assert newest(tmp_path) is None
    assert manager.is_writing
    slow_disk.release(1000)
    manager.close()
    assert not manager.is_writing
    assert manager.outcomes == {1: "committed", 2: "committed", 3: "committed"}
    assert not saved_states(tmp_path, 3)


def fail_alone(rank: int, size: int, store: Any, folder: Path) -> int | None:
    """Save to one folder per node; the second node's disk fails once, after the commit decision."""
    rename = save._rename

    def full(task: save.Task) -> None:
        if task.step == 1 and rank:
            raise OSError(28, "No space left on device")
        rename(task)

    save._rename = full
    options = Options(chunk_bytes=4096, folder_ranks=range(rank, rank + 1))
    ranks = Ranks(rank, size, store, PATIENCE)
    manager = CheckpointManager(folder / f"{rank}", ranks, "lazy", 2, options)
    states = States()
    for step in (1, 2):
        states.advance(step)
        manager.begin(step, states.shards, {})
        manager.fence()
        if rank and step == 1:
            with pytest.raises(CheckpointError, match="No space left"):
                manager.wait()
    manager.close()
    found = newest(folder / f"{rank}")
    return found and found.step


def test_a_failure_on_one_node_does_not_affect_the_next_checkpoint(tmp_path: Path) -> None:
    outcomes = run_crew(fail_alone, 2, tmp_path)
    assert [(o.result, o.error) for o in outcomes] == [(2, "")] * 2


def test_the_file_is_plain_safetensors_without_padding(tmp_path: Path) -> None:
    """With tensor=2 rank 1 pads 101 rows to 102."""
    folder, steps = tmp_path, 5

    def rank_main(rank: int, size: int, store: dist.Store) -> None:
        states = States(tensor=2, rank=rank)
        states.advance(steps)
        manager = CheckpointManager(folder, Ranks(rank, size, store, PATIENCE), "lazy", 1, SMALL)
        manager.begin(steps, states.shards, {})
        manager.close()

    assert not [outcome.error for outcome in run_crew(rank_main, 2) if outcome.error]
    checkpoint = newest(folder)
    manifest = checkpoint.manifest
    assert {name: tensor.shape for name, tensor in manifest.tensors.items()} == MODEL
    found = np.empty(MODEL["embedding.tokens.weight"], dtype=np.float32)
    for stored in manifest.tensors["embedding.tokens.weight"].stored_ranges:
        path = checkpoint.folder / stored.file
        tensor = load_file(path)[stored.keys["exp_avg"]]
        raw = np.fromfile(path, np.float32, stored.count, offset=stored.bytes_at["exp_avg"])
        np.testing.assert_array_equal(tensor.numpy(), raw)
        assert stored.first == 0
        found[stored.start[0] :][: stored.shape[0]] = raw.reshape(stored.shape)
    np.testing.assert_array_equal(found, value("embedding.tokens.weight", "exp_avg", steps))
    assert sum(p.count for t in manifest.tensors.values() for p in t.stored_ranges) == sum(
        value(name, "master", 0).size for name in MODEL
    )
    for path in checkpoint.folder.glob("*.safetensors"):
        assert not any(tensor.isnan().any() for tensor in load_file(path).values())


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    manager, states = single_rank_manager(tmp_path, "blocking"), States()
    manager.begin(12, states.shards, {"digest": "x"})
    text = json.loads((tmp_path / "step_00000012" / MANIFEST).read_text())
    assert (text["format"], text["step"], text["world"]) == (1, 12, 1)
    assert text["meta"] == {"digest": "x"}
    assert Manifest.load(tmp_path / "step_00000012").tensors.keys() == MODEL.keys()


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    manager, states = single_rank_manager(tmp_path, "blocking"), States()
    for _ in range(2):
        states.advance(7)
        manager.begin(7, states.shards, {})
        states.advance(8)
    manager.begin(7, states.shards, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000007"]
    assert not saved_states(tmp_path, 8)


@pytest.mark.parametrize("mode", ["blocking", "lazy"])
def test_meta_that_is_not_json_is_a_type_error(mode: str, tmp_path: Path) -> None:
    manager = single_rank_manager(tmp_path, mode)
    with pytest.raises(TypeError):
        manager.begin(1, States().shards, {"when": timedelta()})


def ranks_with_an_error(rank: int, size: int, store: Any, folder: Path, mode: Any) -> list[Any]:
    """Save three steps, where rank 2 cannot write its file of step 2; return this rank's errors."""
    manager = CheckpointManager(folder, Ranks(rank, size, store, PATIENCE), mode, 3, SMALL)
    states = States(tensor=2, data=2, rank=rank)
    errors = []
    for step in (1, 2, 3):
        states.advance(step)
        if rank == 2:
            broken = folder / f"step_{step:08d}.partial" / "rank_00002.safetensors"
            if step == 2:
                broken.mkdir(parents=True)
        try:
            manager.begin(step, states.shards, {})
            manager.fence()
            manager.close()
        except CheckpointError as error:
            errors.append((step, str(error)))
        if rank == 2 and step == 2:
            broken.rmdir()
    return errors


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("mode", ["blocking", "lazy"])
def test_an_error_fails_all_ranks_with_the_first_cause(
    mode: str, store: str, tmp_path: Path
) -> None:
    outcomes = run_crew(ranks_with_an_error, 4, tmp_path, mode, store=store)
    for outcome in outcomes:
        assert not outcome.error, outcome.error
        ((step, message),) = outcome.result
        assert step == 2
        assert message == outcomes[0].result[0][1]
        assert "the checkpoint of step 2 was not written: rank 2: " in message
        assert "rank_00002.safetensors cannot be written: Is a directory" in message
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "step_00000003"}
    assert not saved_states(tmp_path, 3)


def test_the_keys_of_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    store = dist.HashStore()
    manager = CheckpointManager(tmp_path, Ranks(0, 1, store, PATIENCE), "blocking", 1, SMALL)
    states = States()
    counts = []
    for step in range(1, 6):
        manager.begin(step, states.shards, {})
        counts.append(store.num_keys())
    assert counts[1] == counts[-1]


def test_more_memory_than_the_host_has_is_refused(tmp_path: Path) -> None:
    manager = single_rank_manager(tmp_path, options=Options(ranks_on_host=10**9))
    with pytest.raises(CheckpointError, match=r"on each of the 1000000000 ranks of a node.*free"):
        manager.prepare(States().shards)
