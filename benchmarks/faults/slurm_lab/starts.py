"""Measure the start-up of a run: its seconds, and its store operations for many ranks.

The store is the key-value server through which ranks find each other and exchange reports.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness import train_run

RANKS = (2, 8, 16)
"""Numbers of ranks of the runs whose start-up is timed."""
SIMULATED_RANKS = (48, 768, 3072)
"""Numbers of ranks for which store operations are counted in a simulated start-up."""
EXPERIMENT = "experiment=frontier_1t_tp8"
"""Configuration whose start-up is simulated."""
TINY = (
    "model.layers=2", "model.hidden=32", "model.heads=2", "data.sequence_length=16",
    "data.global_batch=16", "data.micro_batch=1", "parallel.pipeline=1", "trainer.steps=1",
    "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1", "trainer.sample_tokens=0",
    "precision=fp32", "checkpoint=off", "telemetry.wandb=off", "telemetry.progress=false",
)  # fmt: skip
"""Overrides of the runs whose start-up is timed."""


def starts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Measure the rows `seconds` and `operations` of benchmarks/results/starts.json."""
    return {
        "seconds": [{"ranks": ranks, "seconds": _seconds(folder, ranks)} for ranks in RANKS],
        "operations": [_operations(size) for size in SIMULATED_RANKS],
    }


def _seconds(folder: Path, ranks: int) -> float:
    """Return the seconds of a run of one step."""
    start = time.monotonic()
    train_run((*TINY, f"launch.ranks={ranks}"), folder / f"start_{ranks}_{time.time_ns()}")
    return round(time.monotonic() - start, 1)


def _operations(size: int) -> dict[str, int]:
    """Count the store operations of the first and the last of `size` ranks during start-up.

    A process simulates each of these two ranks with torch's fake process group: it makes all
    process groups of the rank, but collectives do nothing.
    """
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        first, last = (pool.apply(count_here, (size, rank)) for rank in (0, size - 1))
    return {
        "ranks": size,
        "last_rank": last["operations"],
        "rank_0": first["operations"],
        "collectives": last["collectives"],
    }


def count_here(size: int, rank: int) -> dict[str, int]:
    """Simulate the start-up of one of `size` ranks in this process; return the counts."""
    from frontier_llm.cli.compose import compose
    from frontier_llm.config import decode
    from frontier_llm.device.accelerator import Accelerator
    from frontier_llm.geometry.resolved import ResolvedLayout
    from frontier_llm.launch.world import World
    from frontier_llm.parallel import megatron_cpu
    from frontier_llm.trainer import connect

    pipeline = max(1, size // 24)  # with 8 tensor ranks, 3 data-parallel replicas remain
    overrides = [EXPERIMENT, "checkpoint=off", "parallel.tensor=8", f"parallel.pipeline={pipeline}"]
    config = decode(compose(overrides))
    world = World(
        rank=rank,
        size=size,
        local_rank=rank % 8,
        ranks_per_node=8,
        host="host",
        launcher="local",
        master_address="host",
        master_port=1,
    )
    layout = ResolvedLayout.resolve(config, size, world.ranks_per_node, check_rules=False)
    store = _answering_store(size)
    megatron_cpu.install()
    with _fake_group(connect, store):
        groups, _ = connect.connect(config, layout, world, store, Accelerator.of_rank(0))
    assert groups.grid.size == size
    return {"operations": store.operations, "collectives": store.collectives}


def _answering_store(size: int) -> Any:
    """Return a store that counts operations and answers as if all other ranks were running."""
    import torch.distributed as dist

    class AnsweringStore(dist.HashStore):
        operations = collectives = 0
        report = b""

        def set(self, key: str, value: str) -> None:
            self.operations += 1
            super().set(key, value)

        def get(self, key: str) -> bytes:
            self.operations += 1
            # what this rank has not written is the verdict on a check, which all ranks passed
            return bytes(super().get(key)) if self.check([key]) else b'{"text": "passed"}'

        def add(self, key: str, amount: int) -> int:
            self.operations += 1
            return size if amount else 0  # this rank is the last of all ranks to arrive

        def wait(self, keys: list[str], timeout: timedelta = timedelta(0)) -> None:
            self.operations += 1

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.operations += 1
            # all ranks report what this rank has reported; keys are read in parts
            if own := [key for key in keys if self.check([key])]:
                self.report = bytes(super().get(own[0]))
            return [self.report for _ in keys]

    return AnsweringStore()


@contextmanager
def _fake_group(connect: Any, store: Any) -> Iterator[None]:
    """Let `connect` start torch's fake process group instead of gloo.

    Collectives of the fake group never complete, so the check of each process group is replaced:
    it counts one collective and does not run it.
    """
    import torch.distributed as dist

    def start(world: Any, *_: Any) -> None:
        dist.init_process_group("fake", store=store, rank=world.rank, world_size=world.size)

    def check(trials: Any, world: Any, store: Any, *_: Any) -> None:
        for trial in trials:
            store.set(f"preflight/at/{world.rank}", trial.name)
            store.collectives += 1

    originals = connect.init_process_group, connect.check_groups
    connect.init_process_group, connect.check_groups = start, check
    try:
        yield
    finally:
        connect.init_process_group, connect.check_groups = originals
