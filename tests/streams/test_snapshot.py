"""A lazy checkpoint of states on a GPU has the values of its step in every order of the streams.

The streams and events of torch.cuda are those of a virtual device (virtual_device.py); the
snapshot, its pool and its plan are the real ones. Then each wait is removed in turn: without it,
some order stores other values.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.checkpoint.write_plan import WritePlan, make_write_plan
from frontier_llm.launch.world import World
from tests.checkpoint.states import States
from tests.ranks import run_ranks
from tests.streams.mutations import mutate
from tests.streams.virtual_cuda import virtual_cuda
from tests.streams.virtual_device import Order, VirtualDevice

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CHUNK_BYTES = 8192
BUFFERS = 5
"""Of a small pool: one for the writer, and four for captured chunks."""


class Run:
    """States whose values after each step are known, and the plan of their checkpoints."""

    def __init__(self, buffers: int | None = BUFFERS) -> None:
        """Make a pool with this number of buffers; None = enough for the whole file."""
        self._shards = States().shards
        on_host = make_write_plan(self._shards, 0, CHUNK_BYTES)
        self.plan: WritePlan = replace(on_host, device=GPU)
        self.chunks = len(self.plan.chunks)
        self.pool = ChunkPool(buffers or self.chunks + 1, CHUNK_BYTES, CPU)

    def update(self, step: int) -> None:
        """Launch the update of a step."""
        for number, shard in enumerate(self._shards):
            for state in shard.states.values():
                state.fill_(1000 * step + number)

    def expected(self, step: int) -> list[bytes]:
        """Return the chunks of the file of a step; overwrites the states, on no device."""
        self.update(step)
        return [self._filled(index) for index in range(self.chunks)]

    def _filled(self, index: int) -> bytes:
        buffer = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
        self.plan.fill(index, buffer)
        return self.content(buffer, index)

    def content(self, buffer: torch.Tensor, index: int) -> bytes:
        """Return the bytes of a chunk that the host finds in a buffer now."""
        return buffer.numpy()[: self.plan.chunk_size(index)].tobytes()


def saved(order: Order, read_before_update: int) -> tuple[list[bytes], list[bytes]]:
    """Return the chunks of a checkpoint after step 1 as they are stored, and as expected.

    Args:
        order: order of the streams.
        read_before_update: number of chunks that the writer reads before the update of step 2; if
            it is 0, the pool holds the whole file.
    """
    run = Run(BUFFERS if read_before_update else None)
    with virtual_cuda(order) as device:
        run.update(0)
        device.synchronise()  # the host reads the loss
        run.update(1)
        stored = store(run, device, 1, read_before_update)
    return stored, run.expected(1)


def saved_after_a_failure(order: Order) -> tuple[list[bytes], list[bytes]]:
    """Return the chunks after step 2, when the writer of the checkpoint of step 1 has failed."""
    run = Run()
    with virtual_cuda(order) as device:
        run.update(1)
        Snapshot(run.plan, run.pool).close()
        for buffer in [run.pool.take() for _ in range(BUFFERS)]:
            run.pool.give_back(buffer)  # the next snapshot gets them in another order
        run.update(2)
        stored = store(run, device, 2, run.chunks - BUFFERS + 1)
    return stored, run.expected(2)


def store(run: Run, device: VirtualDevice, step: int, read_before_update: int) -> list[bytes]:
    """Return the chunks of a checkpoint that begins now, while the run goes on to the next step."""
    snapshot = Snapshot(run.plan, run.pool)
    stored: list[bytes] = []
    chunks = iter(snapshot)
    for index in range(run.chunks):
        if index == read_before_update:
            snapshot.fence()
            run.update(step + 1)
            device.synchronise()  # the host reads the loss
        buffer, _ = next(chunks)
        stored.append(run.content(buffer, index))
    chunks.close()
    snapshot.close()
    return stored


def differs(order: Order, read_before_update: int | None) -> bool:
    """Whether a checkpoint has other values; None: the writer of the one before has failed."""
    if read_before_update is None:
        stored, expected = saved_after_a_failure(order)
    else:
        stored, expected = saved(order, read_before_update)
    return stored != expected


CASES = [0, *range(Run().chunks - BUFFERS + 1, Run().chunks), None]
MUTATIONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "the first copies wait for the update before": (
        Snapshot._begin_on_device,
        "self._stream.wait_stream(torch.cuda.current_stream(self._plan.device))",
        "pass",
    ),
    "the next update waits for the copies": (
        Snapshot.fence,
        "torch.cuda.current_stream(self._plan.device).wait_stream(self._stream)",
        "pass",
    ),
    "the writer waits for a copy that it makes": (Snapshot._fill, "event.synchronize()", "pass"),
    "the writer waits for a copy made before": (Snapshot._next, "event.synchronize()", "pass"),
    "buffers are free only after all copies into them": (
        Snapshot._abandon,
        "self._stream.synchronize()",
        "pass",
    ),
}
"""By the wait that is removed: the change of the source."""


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("case", CASES)
def test_every_order_stores_the_values_of_the_step(case: int | None, order: Order) -> None:
    assert not differs(order, case)


@pytest.mark.parametrize("wait", MUTATIONS)
def test_no_wait_can_be_removed(wait: str) -> None:
    assert run_ranks(mutated_differs, 1, MUTATIONS[wait]) == [True]


def mutated_differs(_: World, mutation: tuple[Callable[..., Any], str, str]) -> bool:
    mutate(*mutation)
    return any(differs(order, case) for order in Order for case in CASES)
