"""Three threads copy the chunks of a snapshot, each once, and with the values of its step."""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.errors import CheckpointError
from tests.patience import patient, wait_until

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)
CHUNK_BYTES, CHUNKS = 4096, 9


class Plan:
    """A plan whose chunks have the value of the state; it counts the copies."""

    device = CPU
    chunks = tuple(range(CHUNKS))

    def __init__(self, delay: float = 0.0, fails_at: int | None = None) -> None:
        self.state, self._delay, self._fails_at = 1, delay, fails_at
        self.copies: list[tuple[int, str]] = []
        """(chunk, name of the thread) of each copy."""

    def chunk_size(self, _: int) -> int:
        return CHUNK_BYTES

    def fill(self, index: int, buffer: torch.Tensor) -> None:
        self.copies.append((index, threading.current_thread().name))
        if index == self._fails_at:
            raise ValueError("no such state")
        time.sleep(random.random() * self._delay)
        buffer.fill_(self.state)


class Threads:
    """A snapshot, and the threads that capture and write it."""

    def __init__(self, plan: Plan, buffers: int, seconds_per_write: float = 0.0) -> None:
        self.pool = ChunkPool(buffers + 1, CHUNK_BYTES, CPU)
        self.snapshot = Snapshot(plan, self.pool)  # type: ignore[arg-type]
        self.capture = threading.Thread(target=self.snapshot.capture, name="capture")
        self._write = threading.Thread(target=self._run, name="write")
        self._seconds_per_write = seconds_per_write
        self.written: list[int] = []
        self.error: CheckpointError | None = None

    def start_writer(self) -> None:
        self._write.start()

    def _run(self) -> None:
        try:
            for buffer, _ in self.snapshot:
                time.sleep(random.random() * self._seconds_per_write)
                values = set(buffer.tolist())
                assert len(values) == 1
                self.written.append(values.pop())
        except CheckpointError as error:
            self.error = error
        finally:
            self.snapshot.close()

    def join(self) -> None:
        for thread in (self.capture, self._write):
            if thread.ident is not None:
                thread.join(patient(10))
                assert not thread.is_alive()


@pytest.mark.parametrize("buffers", [0, 1, 3, CHUNKS, 2 * CHUNKS])
@pytest.mark.parametrize("slow", ["copies", "writes"])
def test_each_chunk_is_copied_once_before_the_states_change(buffers: int, slow: str) -> None:
    for seed in range(5):
        random.seed(seed)
        plan = Plan(delay=0.002 if slow == "copies" else 0.0)
        threads = Threads(plan, buffers, 0.002 if slow == "writes" else 0.0)
        threads.capture.start()
        threads.start_writer()
        time.sleep(random.random() * 0.01)
        threads.snapshot.fence()
        plan.state = 2
        threads.join()
        assert threads.written == [1] * CHUNKS
        assert sorted(index for index, _ in plan.copies) == list(range(CHUNKS))
        left = [threads.pool.take() for _ in range(buffers + 2)]
        assert left.count(None) == 1, "a buffer is lost"


def test_the_fence_has_nothing_to_copy_after_the_capture() -> None:
    """Even if nothing is written yet, because the disk is slow."""
    plan = Plan()
    threads = Threads(plan, CHUNKS)
    threads.capture.start()
    threads.capture.join(patient(10))
    threads.snapshot.fence()
    plan.state = 2
    assert plan.copies == [(index, "capture") for index in range(CHUNKS)]
    threads.start_writer()
    threads.join()
    assert threads.written == [1] * CHUNKS


def test_the_capture_goes_on_when_the_writer_returns_buffers() -> None:
    plan = Plan()
    threads = Threads(plan, 2)
    threads.capture.start()
    wait_until(lambda: len(plan.copies) == 2)
    assert threads.capture.is_alive()
    assert [index for index, _ in plan.copies] == [0, 1]
    threads.start_writer()
    threads.join()
    assert threads.written == [1] * CHUNKS


@pytest.mark.parametrize("thread", ["capture", "fence", "write"])
def test_a_copy_that_fails_fails_the_checkpoint_and_frees_the_states(thread: str) -> None:
    plan = Plan(fails_at=4)
    threads = Threads(plan, 0 if thread == "write" else CHUNKS)
    failed: Any = None
    if thread == "capture":
        threads.capture.start()
        threads.capture.join(patient(10))
        threads.start_writer()
    elif thread == "fence":
        with pytest.raises(ValueError, match="no such state"):
            threads.snapshot.fence()
        threads.start_writer()
    else:
        failed = threading.excepthook
        threading.excepthook = lambda _: None
        threads.start_writer()
    threads.join()
    threads.snapshot.fence()  # does not hang
    if failed is not None:
        threading.excepthook = failed
    else:
        assert "could not be copied for the checkpoint: no such state" in str(threads.error)
    left = [threads.pool.take() for _ in range(threads.pool.size // CHUNK_BYTES + 1)]
    assert left.count(None) == 1, "a buffer is lost"


def test_the_writers_thread_chooses_its_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device belongs to a thread, and is GPU 0 at first."""
    chosen: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: chosen.setdefault(threading.current_thread().name, device),
    )
    plan = SimpleNamespace(chunks=(), device=GPU)
    snapshot = Snapshot(plan, ChunkPool(0, 4096, torch.device("cpu")))  # type: ignore[arg-type]
    snapshot._stream = object()  # type: ignore[assignment]

    def write() -> None:
        assert list(snapshot) == []

    thread = threading.Thread(target=write, name="checkpoint")
    thread.start()
    thread.join()
    assert chosen == {"checkpoint": GPU}
