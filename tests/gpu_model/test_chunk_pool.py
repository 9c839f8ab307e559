"""The memory of checkpoints is page-locked while it is used, if the states lie on a GPU."""

import gc

import pytest
import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from tests.gpu_model import fake_cuda

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fake_cuda.PRELOADED, reason="run `make test-gpu-model`"),
]


@pytest.mark.parametrize(("device", "registered"), [("cuda", 3 * 4096), ("cpu", 0)])
def test_the_memory_is_registered_with_the_driver(device: str, registered: int) -> None:
    torch.cuda.init()
    before = fake_cuda.stub_count("registered_bytes")
    pool = ChunkPool(3, 4096, torch.device(device))
    assert fake_cuda.stub_count("registered_bytes") - before == registered
    del pool
    gc.collect()
    assert fake_cuda.stub_count("registered_bytes") == before
