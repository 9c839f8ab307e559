"""Run one rank of a saver's turn and measure it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.checkpoint_savers import SAVERS, Place, Saver
from benchmarks.checkpoint.checkpoint_states import KnownStates
from benchmarks.testbed.disk import drop_from_cache
from frontier_llm.errors import TrainingError

MATRIX = 512
"""Rows of the multiplied matrices: 0.27 GFLOP per product, a few milliseconds on one core."""
CALIBRATION_SECONDS = 0.5


@dataclass(frozen=True)
class SaverTurn:
    """Settings of one saver's turn."""

    saver: str
    size: int
    """Size of a rank's states in bytes."""
    saves: int
    """Number of saves in long steps."""
    long_seconds: float
    """Compute of a long step, in which every saver should finish."""
    short_seconds: float
    """Compute of a short step, which takes about as long as a save."""
    short_steps: int
    restores: int


@dataclass(frozen=True)
class Save:
    """One save during a long step."""

    begin_seconds: float
    """Time for which training was blocked when the save began."""
    fence_seconds: float
    """Time for which training was blocked before the update."""
    durable_seconds: float | None
    """Time from the start until the checkpoint was on disk and complete; None: unknown."""
    compute_share: float | None
    """Compute during that time as a fraction of the compute without a save."""
    step_seconds: float
    plain_step_seconds: float
    """Duration of the step before it, without a save."""


@dataclass(frozen=True)
class SaverFigures:
    """Measurements of one rank in a turn."""

    saves: tuple[Save, ...]
    short_seconds: float
    """Duration of all short steps with a save in each, until the last save was complete."""
    plain_short_seconds: float
    """Duration of as many short steps without saves."""
    restore_seconds: tuple[float, ...]
    """Duration of each restore from an empty page cache; empty if the saver cannot restore."""
    states_bytes: int
    """Size of this rank's states."""
    disk_bytes: int
    """Size of a checkpoint of all ranks."""


def saver_figures_from(values: dict[str, Any]) -> SaverFigures:
    """Return a rank's figures from parsed JSON."""
    saves = tuple(Save(**save) for save in values.pop("saves"))
    restores = tuple(values.pop("restore_seconds"))
    return SaverFigures(saves=saves, restore_seconds=restores, **values)


class Compute:
    """The compute of a step: matrix products one after another."""

    def __init__(self) -> None:
        self._factors = torch.rand(2, MATRIX, MATRIX)
        self._product = torch.empty(MATRIX, MATRIX)

    def run(self, products: int, after_each: Callable[[int], None] = lambda _: None) -> None:
        """Compute `products` products; call `after_each` with the number done after each."""
        for done in range(1, products + 1):
            torch.mm(*self._factors, out=self._product)
            after_each(done)

    def products_per_second(self) -> float:
        """Measure the speed while the other ranks do the same."""
        dist.barrier()
        products, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < CALIBRATION_SECONDS:
            self.run(10)
            products += 10
        return products / seconds


class Watch:
    """Records when a save becomes durable, and how many products were computed until then."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.at: float | None = None
        self.products = 0

    def look(self, products: int) -> None:
        """Ask the saver, after `products` products of this step."""
        if self.at is None and self._saver.is_durable():
            self.at, self.products = time.perf_counter(), products


class Rank:
    """One rank of a turn; all ranks do the same."""

    def __init__(self, turn: SaverTurn, place: Place) -> None:
        self._turn, self._place = turn, place
        self._states = KnownStates(place.rank, place.ranks, turn.size)
        self._saver: Saver = SAVERS[turn.saver][1](self._states, place)
        self._compute, self._step = Compute(), 0
        speed = torch.tensor(self._compute.products_per_second())
        dist.all_reduce(speed, dist.ReduceOp.MIN)  # all ranks compute the same number of products
        self._speed = float(speed)

    def run(self) -> SaverFigures:
        """Run the turn and return its figures.

        Raises:
            TrainingError: the restored states differ from the saved ones.
        """
        turn = self._turn
        products, short_products = (
            max(1, round(seconds * self._speed))
            for seconds in (turn.long_seconds, turn.short_seconds)
        )
        self._long_step(products, 0.0)  # the first one allocates
        saves = [
            self._long_step(products, self._plain_steps(products, 1)) for _ in range(turn.saves)
        ]
        short, plain = self._short_steps(short_products)
        passes = turn.restores if self._saver.can_restore else 0
        restores = [self._restore() for _ in range(passes)]
        self._saver.close()
        return SaverFigures(
            saves=tuple(saves),
            short_seconds=short,
            plain_short_seconds=plain,
            restore_seconds=tuple(restores),
            states_bytes=self._states.size,
            disk_bytes=sum(path.stat().st_size for path in self._files()),
        )

    def _plain_steps(self, products: int, steps: int) -> float:
        self._settle_disk()
        start, computing = time.perf_counter(), 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            self._compute.run(products)
            computing += time.perf_counter() - begin
            self._update()
        seconds = time.perf_counter() - start
        self._speed = products * steps / computing  # reference for the compute during the next save
        return seconds

    def _long_step(self, products: int, plain_step_seconds: float) -> Save:
        """Run a step with a save, and check after each product whether the save is durable."""
        self._settle_disk()
        watch = Watch(self._saver)
        start = time.perf_counter()
        self._saver.save(self._step)
        begun = time.perf_counter()
        watch.look(0)
        self._compute.run(products, watch.look)
        computed = time.perf_counter()
        self._saver.fence()
        fenced = time.perf_counter()
        self._update()
        end = time.perf_counter()
        self._saver.settle()
        watch.look(products)
        durable = None if watch.at is None else watch.at - start
        return Save(
            begin_seconds=begun - start,
            fence_seconds=fenced - computed,
            durable_seconds=durable,
            compute_share=None if durable is None else watch.products / durable / self._speed,
            step_seconds=end - start,
            plain_step_seconds=plain_step_seconds,
        )

    def _short_steps(self, products: int) -> tuple[float, float]:
        """Run short steps with a save in each, and as many without; return both durations."""
        turn = self._turn
        plain = self._plain_steps(products, turn.short_steps)
        self._settle_disk()
        start = time.perf_counter()
        for _ in range(turn.short_steps):
            self._saver.save(self._step)
            self._compute.run(products)
            self._saver.fence()
            self._update()
        self._saver.settle()
        return time.perf_counter() - start, plain

    def _restore(self) -> float:
        if self._place.rank == 0:
            drop_from_cache(self._files())
        self._states.clear()
        dist.barrier()
        start = time.perf_counter()
        self._saver.restore()
        seconds = time.perf_counter() - start
        saved_step = self._step - 1  # the update after the last save is lost
        if not self._states.holds(saved_step):
            raise TrainingError(f"{self._turn.saver} did not restore what it saved")
        return seconds

    def _update(self) -> None:
        self._states.update()
        self._step += 1

    def _settle_disk(self) -> None:
        """Wait for all ranks and for pending writes."""
        os.sync()
        dist.barrier()

    def _files(self) -> list[Path]:
        return [path for path in self._place.folder.rglob("*") if path.is_file()]
