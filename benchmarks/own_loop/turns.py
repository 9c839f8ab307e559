"""What a rank of bench_library.py measures in a turn: the speed of steps, or the cost of saves."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.own_loop.llama import Shape, tokens_of
from benchmarks.own_loop.loops import Precision, make
from benchmarks.own_loop.savers import make_saver
from benchmarks.testbed.foreign_load import busy_seconds
from benchmarks.testbed.sent_counter import tcp_sent_bytes
from frontier_llm.device.accelerator import keep_freed_memory


@dataclass(frozen=True)
class Steps:
    """Numbers of steps in a turn."""

    warmup: int
    """Steps before the timed ones."""
    timed: int
    every: int = 1
    """Steps from one save to the next; only for a turn with saves."""


@dataclass(frozen=True)
class SpeedFigures:
    """Measurements of one rank without saves."""

    step_seconds: float
    """Mean time of the timed steps."""
    cpu_seconds: float
    """CPU time of this process per timed step, with the threads of gloo."""
    idle_share: float
    """Idle share of all cores of the machine during the timed steps."""
    losses: tuple[float, ...]
    """Losses of all steps, warm-up first."""
    sent_bytes: float | None
    """Bytes per step that this rank wrote to TCP sockets; None if they cannot be counted."""
    counted_bytes: float | None
    """Bytes of a step as the library counts them; None for other contenders."""


@dataclass(frozen=True)
class SaveFigures:
    """Measurements of one rank with saves."""

    blocked_seconds: float
    """Time per step for which a save blocked the loop: its call, the wait for copies before the
    update, and the wait for the previous save."""
    step_seconds: float
    """Time per step with saves, until the last save is complete."""
    plain_step_seconds: float
    """Time per step without saves, just before."""
    saves: int
    """Number of saves."""


def speed_turn(
    rank: int, contender: str, shape: Shape, precision: Precision, threads: int, steps: Steps
) -> SpeedFigures:
    """Build a contender, warm up, and time some steps. Collective over all ranks."""
    _set_up(threads)
    ranks, loop = dist.get_world_size(), make(contender, shape, precision)
    batches = [tokens_of(shape, rank, ranks, i) for i in range(steps.warmup + steps.timed)]
    losses = [loop.step(batch) for batch in batches[: steps.warmup]]
    loop.counted_bytes()
    loop.settle()
    dist.barrier()
    sent, busy, cpu, start = tcp_sent_bytes(), busy_seconds(), _cpu_seconds(), time.perf_counter()
    losses += [loop.step(batch) for batch in batches[steps.warmup :]]
    loop.settle()
    dist.barrier()  # the slowest rank counts
    seconds = time.perf_counter() - start
    idle = 1 - (busy_seconds() - busy) / (seconds * (os.cpu_count() or 1))
    cpu, after, counted = _cpu_seconds() - cpu, tcp_sent_bytes(), loop.counted_bytes()
    return SpeedFigures(
        step_seconds=seconds / steps.timed,
        cpu_seconds=cpu / steps.timed,
        idle_share=max(0.0, idle),  # clock ticks are coarse
        losses=tuple(losses),
        sent_bytes=(after.written - sent.written) / steps.timed if sent and after else None,
        counted_bytes=None if counted is None else counted / steps.timed,
    )


def save_turn(
    rank: int,
    saver_name: str,
    shape: Shape,
    precision: Precision,
    threads: int,
    steps: Steps,
    folder: str,
) -> SaveFigures:
    """Time steps without saves, then as many with a save every few steps. Collective.

    One save before is not counted, because it allocates memory.
    """
    _set_up(threads)
    saver = make_saver(saver_name, shape, precision, Path(folder))
    ranks = dist.get_world_size()
    batches = [tokens_of(shape, rank, ranks, i) for i in range(steps.timed)]
    for batch in batches[: steps.warmup]:
        saver.step(batch, is_due=True)
        saver.settle()
    saver.take_blocked_seconds()

    def without() -> None:
        for batch in batches:
            saver.step(batch, is_due=False)

    def with_saves() -> None:
        for index, batch in enumerate(batches):
            saver.step(batch, is_due=index % steps.every == 0)
        saver.settle()

    plain = _time(without)
    saver.take_blocked_seconds()
    seconds = _time(with_saves)
    blocked = saver.take_blocked_seconds()
    saver.close()
    return SaveFigures(
        blocked_seconds=blocked / steps.timed,
        step_seconds=seconds / steps.timed,
        plain_step_seconds=plain / steps.timed,
        saves=len(range(0, steps.timed, steps.every)),
    )


def _set_up(threads: int) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _time(work: Callable[[], None]) -> float:
    """Return the time of `work` in seconds, from and to a barrier of all ranks."""
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start
