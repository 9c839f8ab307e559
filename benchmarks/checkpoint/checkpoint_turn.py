"""Run one rank of a saver's turn in bench_checkpoint, and measure it.

"Compute" is the work of a training step apart from the update: a number of matrix products.
"""

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
"""How long the speed of the products is measured before a turn."""


@dataclass(frozen=True)
class SaverTurn:
    """Settings of one saver's turn."""

    saver: str
    size: int
    """Size of a rank's states in bytes."""
    saves: int
    """Number of saves in long steps."""
    long_seconds: float
    """Seconds of compute in a long step, in which every saver should finish."""
    short_seconds: float
    """Seconds of compute in a short step, about as long as a save takes."""
    short_steps: int
    """Number of short steps with saves, and of short steps without."""
    restores: int
    """Number of restores."""


@dataclass(frozen=True)
class Save:
    """One save during a long step."""

    begin_seconds: float
    """Time for which training was blocked when the save began."""
    fence_seconds: float
    """Time for which training was blocked before the update."""
    durable_seconds: float | None
    """Time from the start of the save until the checkpoint was on disk; None: unknown."""
    compute_share: float | None
    """Products computed during durable_seconds, divided by the number without a save."""
    step_seconds: float
    """Duration of the step with the save."""
    plain_step_seconds: float
    """Duration of the step before, without a save."""


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
    """Size of this rank's states in bytes."""
    disk_bytes: int
    """Size of a checkpoint of all ranks in bytes."""


def saver_figures_from(values: dict[str, Any]) -> SaverFigures:
    """Return the measurements of a rank from parsed JSON."""
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
        self.durable_time: float | None = None
        """Value of time.perf_counter() when the save was durable; None: it is not yet."""
        self.products = 0
        """Number of products of the step that were computed until then."""

    def look(self, products: int) -> None:
        """Ask the saver whether the save is durable, after `products` products of this step."""
        if self.durable_time is None and self._saver.is_durable():
            self.durable_time, self.products = time.perf_counter(), products


class Rank:
    """One rank of a turn; all ranks run the same steps."""

    def __init__(self, turn: SaverTurn, place: Place) -> None:
        self._turn, self._place = turn, place
        self._states = KnownStates(place.rank, place.ranks, turn.size)
        self._saver: Saver = SAVERS[turn.saver][1](self._states, place)
        self._compute, self._step = Compute(), 0
        speed = torch.tensor(self._compute.products_per_second())
        dist.all_reduce(speed, dist.ReduceOp.MIN)  # all ranks compute the same number of products
        self._products_per_second = float(speed)

    def run(self) -> SaverFigures:
        """Run the turn and return its figures.

        Raises:
            TrainingError: the restored states differ from the saved ones.
        """
        turn = self._turn
        products, short_products = (
            max(1, round(seconds * self._products_per_second))
            for seconds in (turn.long_seconds, turn.short_seconds)
        )
        self._long_step(products, 0.0)  # not counted, because the first save allocates memory
        saves = [
            self._long_step(products, self._plain_steps(products, 1)) for _ in range(turn.saves)
        ]
        short, plain = self._short_steps(short_products)
        number = turn.restores if self._saver.can_restore else 0
        restores = [self._restore() for _ in range(number)]
        self._saver.close()
        dist.barrier()  # the files of all ranks are counted
        return SaverFigures(
            saves=tuple(saves),
            short_seconds=short,
            plain_short_seconds=plain,
            restore_seconds=tuple(restores),
            states_bytes=self._states.size,
            disk_bytes=sum(path.stat().st_size for path in self._files()),
        )

    def _plain_steps(self, products: int, steps: int) -> float:
        """Run steps without a save; return their duration in seconds."""
        self._settle_disk()
        start, computing = time.perf_counter(), 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            self._compute.run(products)
            computing += time.perf_counter() - begin
            self._update()
        seconds = time.perf_counter() - start
        # the speed of the next step with a save is compared with this one
        self._products_per_second = products * steps / computing
        return seconds

    def _long_step(self, products: int, plain_step_seconds: float) -> Save:
        """Run a step with a save, and check after each product whether the save is durable.

        Args:
            products: number of matrix products of the step.
            plain_step_seconds: duration of the step before, without a save.
        """
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
        durable = share = None
        if watch.durable_time is not None:
            durable = watch.durable_time - start
            share = watch.products / durable / self._products_per_second
        return Save(
            begin_seconds=begun - start,
            fence_seconds=fenced - computed,
            durable_seconds=durable,
            compute_share=share,
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
        """Restore from an empty page cache and check the values; return the duration in seconds."""
        dist.barrier()  # another rank may still be deleting its previous file
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
