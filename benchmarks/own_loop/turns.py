"""What a rank of bench_library.py measures in a turn: the speed of steps, or the cost of saves.

The savers are the library's lazy checkpoints, which a thread writes, and torch.distributed
.checkpoint (DCP) of the FSDP2 model and its optimizer, in the same number of bytes.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.checkpoint.savers import DcpMode, DcpWriter
from benchmarks.own_loop.loops import FsdpLoop, LibraryLoop, Precision, Shape, make, tokens_of
from benchmarks.testbed.sent_counter import tcp_sent_bytes
from frontier_lab.calibration.foreign_load import busy_seconds, idle_share
from frontier_llm.device.accelerator import keep_freed_memory
from frontier_llm.library import Checkpoints


class Saver(Protocol):
    """One rank of a training loop that saves its states."""

    def step(self, tokens: torch.Tensor, *, is_due: bool) -> None:
        """Run a step, and save the states after it, or start to, if a save is due. Collective."""

    def settle(self) -> None:
        """Wait until the last save is complete; this time is not counted as blocked."""

    def take_blocked_seconds(self) -> float:
        """Return for how long saves have blocked the loop since the last call."""

    def close(self) -> None:
        """Release all resources."""


class LibrarySaver:
    """The library's lazy checkpoints, which a thread writes."""

    def __init__(self, shape: Shape, precision: Precision, folder: Path) -> None:
        self._loop = LibraryLoop(shape, precision)
        self._checkpoints = Checkpoints(folder, self._loop.states, keep=1)
        self._step, self._blocked = 0, 0.0

    def step(self, tokens: torch.Tensor, *, is_due: bool) -> None:
        """Run a step; see `Saver`. The update waits for the copies of the previous save."""
        self._step += 1
        self._loop.step(tokens, saved=is_due)
        if is_due:
            self._checkpoints.save(self._step)

    def settle(self) -> None:
        """Wait for the commit."""
        self._blocked += self._checkpoints.take_stall_seconds()
        self._checkpoints.close()
        self._checkpoints.take_stall_seconds()

    def take_blocked_seconds(self) -> float:
        """Return the stall that the library counts: planning, waits and copies."""
        blocked, self._blocked = self._blocked + self._checkpoints.take_stall_seconds(), 0.0
        return blocked

    def close(self) -> None:
        """Wait for the commit."""
        self._checkpoints.close()


class DcpSaver:
    """DCP of an FSDP2 model and optimizer."""

    def __init__(self, shape: Shape, precision: Precision, folder: Path, mode: DcpMode) -> None:
        self._loop, self._writer = FsdpLoop(shape, precision), DcpWriter(mode)
        self._folder, self._saves, self._blocked = folder, 0, 0.0

    def step(self, tokens: torch.Tensor, *, is_due: bool) -> None:
        """Run a step; see `Saver`."""
        self._loop.passes(tokens)
        with self._blocking():
            self._writer.fence()
        self._loop.update()
        if is_due:
            with self._blocking():
                self._save()

    def settle(self) -> None:
        """Wait for the saving thread."""
        self._writer.settle()

    def take_blocked_seconds(self) -> float:
        """Return the time of the calls of DCP and of the waits for its threads."""
        blocked, self._blocked = self._blocked, 0.0
        return blocked

    def close(self) -> None:
        """End the thread of the stager."""
        self._writer.close()

    def _save(self) -> None:
        self.settle()  # DCP allows one asynchronous save at a time
        self._saves += 1
        model, optimizer = get_state_dict(self._loop.model, self._loop.optimizer)
        states = {"model": model, "optimizer": optimizer}
        self._writer.write(states, self._folder / str(self._saves))

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._blocked += time.perf_counter() - start


_DCP_MODES: dict[str, DcpMode] = {
    "dcp-save": "save",
    "dcp-async": "async",
    "dcp-async-stager": "async-stager",
}
SAVERS = ("library", *_DCP_MODES)
"""Names of the savers."""


def make_saver(name: str, shape: Shape, precision: Precision, folder: Path) -> Saver:
    """Build one rank of a saver with an empty folder. Collective over all ranks."""
    if name == "library":
        return LibrarySaver(shape, precision, folder)
    return DcpSaver(shape, precision, folder, _DCP_MODES[name])


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
    idle = idle_share(busy_seconds() - busy, seconds) or 0.0
    cpu, after, counted = _cpu_seconds() - cpu, tcp_sent_bytes(), loop.counted_bytes()
    return SpeedFigures(
        step_seconds=seconds / steps.timed,
        cpu_seconds=cpu / steps.timed,
        idle_share=idle,
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
    folder: Path,
) -> SaveFigures:
    """Time steps without saves, then as many with a save every few steps. Collective.

    One save before is not counted, because it allocates memory.
    """
    _set_up(threads)
    saver = make_saver(saver_name, shape, precision, folder)
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
