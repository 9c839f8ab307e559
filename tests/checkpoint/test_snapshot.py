"""The thread that writes a checkpoint uses the GPU of its rank."""

import threading
from types import SimpleNamespace

import pytest
import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.snapshot import Snapshot

GPU = torch.device("cuda", 3)


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
        assert list(snapshot.chunks()) == []

    thread = threading.Thread(target=write, name="checkpoint")
    thread.start()
    thread.join()
    assert chosen == {"checkpoint": GPU}
