"""Predict how long training with a saver takes, from rates that are measured without training.

The predictions are lower bounds: they leave out serialisation, digests, agreement between ranks,
and the cores and the memory bandwidth that the writer and the computation share.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.saved_training.training_savers import ASYNCHRONOUS, OURS
from benchmarks.testbed import disk
from benchmarks.testbed.forked import on_ranks
from frontier_llm.units import MIB

REPETITIONS = 3
"""Measurements of each rate; the shortest time counts, because a bound is wanted."""


@dataclass(frozen=True)
class Rates:
    """Rates in bytes per second of all ranks together."""

    write: float
    """Writes of 16 MiB to one file per rank that bypass the page cache, with fsync."""
    copy: float
    """Copies from memory to memory that is allocated already."""


@dataclass(frozen=True)
class Limit:
    """A lower bound of the time of a step."""

    step_seconds: float
    """Time per step, with the share of a save."""
    cause: str
    """The part that sets this time."""


def measure_rates(ranks: int, rank_bytes: int, folder: Path) -> Rates:
    """Measure the rates on all ranks at once.

    Args:
        ranks: number of ranks.
        rank_bytes: bytes of the states of a rank.
        folder: a folder on the disk of the checkpoints.

    Raises:
        LaunchError: a rank failed.
    """
    blocks = max(1, rank_bytes // disk.BLOCK_BYTES)
    times = on_ranks(_rank_seconds, ranks, str(folder), blocks)
    write, copy = (max(column) for column in zip(*times, strict=True))
    total = ranks * blocks * disk.BLOCK_BYTES
    return Rates(total / write, total / copy)


def limit_of(saver: str, every: int, plain_seconds: float, size: int, rates: Rates) -> Limit:
    """Return the lower bound of a step's time with a saver.

    Args:
        saver: one of `SAVERS`.
        every: steps from one save to the next.
        plain_seconds: time of a step without saves.
        size: bytes of a checkpoint of all ranks.
        rates: the rates of the machine.
    """
    copy, write = size / rates.copy / every, size / rates.write / every
    if saver == OURS:  # chunks are written while the step computes
        return _overlapped(0.0, plain_seconds, write)
    if saver == "dcp-async-stager":  # a thread copies, then serialises into the page cache
        return _overlapped(0.0, plain_seconds, 2 * copy + write)
    if saver in ASYNCHRONOUS:  # training waits for the copy
        return _overlapped(copy, plain_seconds, copy + write)
    return Limit(plain_seconds + copy + write, "step and save")


def _overlapped(blocked: float, plain_seconds: float, background: float) -> Limit:
    cause = "step" if plain_seconds >= background else "disk"
    return Limit(blocked + max(plain_seconds, background), cause)


def _rank_seconds(rank: int, folder: str, blocks: int) -> tuple[float, float]:
    """Return the seconds of writing and of copying as many blocks, with all other ranks."""
    path, buffer = Path(folder) / f"plain_{rank}", disk.filled_buffer()
    source = torch.ones(blocks * disk.BLOCK_BYTES // MIB, MIB, dtype=torch.uint8)
    target = torch.zeros_like(source)
    write = _shortest(lambda: disk.write_blocks(path, buffer, blocks))
    path.unlink()
    return write, _shortest(lambda: target.copy_(source))


def _shortest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPETITIONS):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
