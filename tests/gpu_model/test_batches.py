"""The loader copies batches to a GPU while the step before computes, and nobody waits.

The stand-in for CUDA has memory, in which copies are made at once.
"""

import ctypes
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from frontier_llm.config.denoisers import T5
from frontier_llm.data.batch import Batch, named_tensors
from frontier_llm.data.denoising import Denoising
from frontier_llm.data.loader import BatchLoader, MakeBatch, Reading, causal_batch
from tests.gpu_model import fake_cuda

pytestmark = pytest.mark.skipif(not fake_cuda.PRELOADED, reason="run `make test-gpu-model`")

DEVICE = torch.device("cuda", 1)  # a thread begins on the other one
GLOBAL_BATCH, MICRO_BATCH, LENGTH = 8, 2, 65
BLOCKING = ("device_waits", "event_waits", "stream_waits", "pageable_copies", "copies_on_stream_0",
            "choices_of_device_0")  # fmt: skip
"""Counters of cuda_stub.c that the copies of batches must not increase."""


class Samples:
    """Windows of random tokens."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(100, size=LENGTH)


@pytest.fixture(autouse=True)
def current_device() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    yield
    torch.cuda.set_device(0)


def make_loader(device: torch.device, make_batch: MakeBatch = causal_batch) -> BatchLoader:
    return BatchLoader(Samples(), GLOBAL_BATCH, MICRO_BATCH, 0, 1, make_batch, Reading(device))


def wait_for_thread(loader: BatchLoader) -> None:
    """Wait until the following step is read ahead and its copies are submitted."""
    ((future,),) = loader._ahead.values()
    future.result()


@pytest.mark.parametrize(
    "make_batch",
    [causal_batch, Denoising(T5, LENGTH, LENGTH, range(200, 100, -1), {}, 1, 7).batch],
)
def test_batches_arrive_without_a_wait_and_equal_those_of_a_cpu(make_batch: MakeBatch) -> None:
    with (
        closing(make_loader(DEVICE, make_batch)) as loader,
        closing(make_loader(torch.device("cpu"), make_batch)) as on_cpu,
    ):
        loader.read_step(0)  # the first step is read by this thread
        for first in (GLOBAL_BATCH, 2 * GLOBAL_BATCH):
            wait_for_thread(loader)
            names = (*BLOCKING, "copies", "waits_of_stream_0")
            before = {name: fake_cuda.stub_count(name) for name in names}
            found, wanted = loader.read_step(first), on_cpu.read_step(first)
            wait_for_thread(loader)
            new = {name: fake_cuda.stub_count(name) - before[name] for name in names}
            assert {name: new[name] for name in BLOCKING} == dict.fromkeys(BLOCKING, 0)
            tensors = [tensor for batch in found.micro_batches for _, tensor in
                       named_tensors(batch)]  # fmt: skip
            assert new["copies"] == len(tensors)
            assert new["waits_of_stream_0"] == 1, "the kernels must wait for the copies"
            assert found.digest == wanted.digest > 0
            for one, other in zip(found.micro_batches, wanted.micro_batches, strict=True):
                for (_, on_device), (_, on_host) in zip(
                    named_tensors(one), named_tensors(other), strict=True
                ):
                    assert on_device.device == DEVICE
                    assert torch.equal(on_device.cpu(), on_host)


def test_memory_that_kernels_may_still_read_is_not_reused() -> None:
    busy = ctypes.c_int.in_dll(ctypes.CDLL(None), "stub_is_busy")

    def addresses(batches: list[Batch]) -> set[int]:
        return {batch.tokens.data_ptr() for batch in batches}

    with closing(make_loader(DEVICE)) as loader:
        loader.read_step(0)
        used: list[set[int]] = []
        for step in range(1, 9):  # batches are freed when the next ones are taken
            busy.value = step < 5
            used.append(addresses(loader.read_step(step * GLOBAL_BATCH).micro_batches))
    while_busy, later = used[:4], used[4:]
    assert len(set.union(*while_busy)) == sum(map(len, while_busy))
    assert len(set.union(*later)) < sum(map(len, later)), "memory is reused when kernels are done"
