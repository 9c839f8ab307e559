"""Run one rank of a saver's turn in bench_checkpoint, and measure it.

The states have known values: the weights and both moments of one rank. "Compute" is the work of a
training step apart from the update: a number of matrix products.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint.savers import SAVERS, Place, Saver
from benchmarks.testbed.disk import drop_from_cache, together
from frontier_llm.checkpoint.manifest import ELEMENT_BYTES
from frontier_llm.errors import TrainingError
from frontier_llm.protocols import ParameterRecord, Placement, StateShard

STATES = ("master", "exp_avg", "exp_avg_sq")
"""States of AdamW."""
COLUMNS = 1024
ROWS = 1024
"""Size of a tensor on one rank. The values are integers small enough to be exact in fp32."""
MATRIX = 512
"""Rows of the multiplied matrices: 0.27 GFLOP per product, a few milliseconds on one core."""
CALIBRATION_SECONDS = 0.5
"""How long the speed of the products is measured before a turn."""


class KnownStates:
    """States of a given size, sharded as in ZeRO-1: each rank holds rows of all tensors.

    An element's value after step k is a function of its position and k, so restored states can be
    checked without a copy. `size` are the bytes of this rank's weights and moments together.
    """

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        all_rows = max(1, size // (len(STATES) * ELEMENT_BYTES * COLUMNS))
        full_tensors, rest = divmod(all_rows, ROWS)
        rows_of_tensors = [ROWS] * full_tensors + ([rest] if rest else [])
        self.shards = [
            _shard(index, rank, ranks, rows) for index, rows in enumerate(rows_of_tensors)
        ]
        self.tensors = {
            f"{shard.record.name}.{state}.{rank}": shard.tensors[state]
            for shard in self.shards
            for state in STATES
        }
        for tensor, first_values in self._tensors_with_first_values():
            tensor.copy_(first_values)

    @property
    def size(self) -> int:
        """Size of this rank's states in bytes."""
        return sum(tensor.numel() for tensor in self.tensors.values()) * ELEMENT_BYTES

    def update(self) -> None:
        """Change every element, as an optimizer's update does."""
        for tensor in self.tensors.values():
            tensor.add_(1.0)

    def clear(self) -> None:
        """Overwrite all values."""
        for tensor in self.tensors.values():
            tensor.fill_(-1.0)

    def holds(self, step: int) -> bool:
        """Return whether every element has the value that it has after `step` updates."""
        return all(
            torch.equal(tensor, first_values + step)
            for tensor, first_values in self._tensors_with_first_values()
        )

    def _tensors_with_first_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor with its values at step 0."""
        for index, tensor in enumerate(self.tensors.values()):
            yield tensor, torch.arange(tensor.numel(), dtype=torch.float32) + 1000.0 * index


def _shard(index: int, rank: int, ranks: int, rows: int) -> StateShard:
    """Return this rank's rows of a tensor, of which every rank has the same number of rows."""
    shape, origin = (ranks * rows, COLUMNS), (0, 0)
    record = ParameterRecord(
        parameter=torch.nn.Parameter(torch.empty(shape, device="meta")),
        unit=f"layers.{index}",
        placements=(Placement(f"layers.{index}.weight", shape, origin, origin, shape),),
        group="matrices",
        counted=True,
        tensor_partial=False,
        tied=False,
    )
    count = rows * COLUMNS
    return StateShard(record, rank * count, {state: torch.empty(count) for state in STATES})


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


class Rank:
    """One rank of a turn; all ranks run the same steps."""

    def __init__(self, turn: SaverTurn, place: Place) -> None:
        self._turn, self._place = turn, place
        self._states = KnownStates(place.rank, place.ranks, turn.size)
        self._saver: Saver = SAVERS[turn.saver](self._states, place)
        self._factors, self._product = torch.rand(2, MATRIX, MATRIX), torch.empty(MATRIX, MATRIX)
        self._step = 0
        speed = torch.tensor(self._measure_speed())
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
        plain = self._plain_steps(short_products, turn.short_steps)
        short = self._short_steps(short_products)
        number = turn.restores if self._saver.can_restore else 0
        restores = [self._restore() for _ in range(number)]
        self._saver.close()
        dist.barrier()  # the files of all ranks are counted
        disk_bytes = sum(path.stat().st_size for path in self._files())
        return SaverFigures(
            tuple(saves), short, plain, tuple(restores), self._states.size, disk_bytes
        )

    def _compute(self, products: int, after_each: Callable[[int], None] = lambda _: None) -> None:
        """Compute matrix products; call `after_each` with the number done after each."""
        for done in range(1, products + 1):
            torch.mm(*self._factors, out=self._product)
            after_each(done)

    def _measure_speed(self) -> float:
        """Return the products per second while the other ranks compute, too."""
        dist.barrier()
        products, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < CALIBRATION_SECONDS:
            self._compute(10)
            products += 10
        return products / seconds

    def _plain_steps(self, products: int, steps: int) -> float:
        """Run steps without a save; return their duration in seconds."""
        self._settle_disk()
        start, computing = time.perf_counter(), 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            self._compute(products)
            computing += time.perf_counter() - begin
            self._update()
        seconds = time.perf_counter() - start
        # the speed of the next step with a save is compared with this one
        self._products_per_second = products * steps / computing
        return seconds

    def _long_step(self, products: int, plain_step_seconds: float) -> Save:
        """Run a step with a save, and check after each product whether the save is durable.

        `plain_step_seconds` is the duration of the step before, without a save.
        """
        self._settle_disk()
        durable: tuple[float, int] | None = None  # when, and the number of products until then

        def look(done: int) -> None:
            nonlocal durable
            if durable is None and self._saver.is_durable():
                durable = time.perf_counter() - start, done

        start = time.perf_counter()
        self._saver.save(self._step)
        begun = time.perf_counter()
        look(0)
        self._compute(products, look)
        computed = time.perf_counter()
        self._saver.fence()
        fenced = time.perf_counter()
        self._update()
        end = time.perf_counter()
        self._saver.settle()
        look(products)
        seconds, done = durable or (None, 0)
        return Save(
            begin_seconds=begun - start,
            fence_seconds=fenced - computed,
            durable_seconds=seconds,
            compute_share=done / seconds / self._products_per_second if seconds else None,
            step_seconds=end - start,
            plain_step_seconds=plain_step_seconds,
        )

    def _short_steps(self, products: int) -> float:
        """Run short steps with a save in each; return the seconds until the last is complete."""
        self._settle_disk()
        start = time.perf_counter()
        for _ in range(self._turn.short_steps):
            self._saver.save(self._step)
            self._compute(products)
            self._saver.fence()
            self._update()
        self._saver.settle()
        return time.perf_counter() - start

    def _restore(self) -> float:
        """Restore from an empty page cache and check the values; return the duration in seconds."""
        dist.barrier()  # another rank may still be deleting its previous file
        if self._place.rank == 0:
            drop_from_cache(self._files())
        self._states.clear()
        seconds = together(self._saver.restore)
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
