"""What one rank does while a way to save has its turn, and the figures that it brings home."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frontier_llm.errors import TrainingError
from tools.bench.checkpoint_savers import SAVERS, Place, Saver
from tools.bench.checkpoint_states import KnownStates
from tools.bench.disk import drop_from_cache

MATRIX = 512
"""Rows of the matrices that are multiplied: 0.27 GFLOP, a few milliseconds on one core."""
CALIBRATION_SECONDS = 0.5


@dataclass(frozen=True)
class SaverTurn:
    """What is asked of one way to save."""

    saver: str
    size: int
    """Bytes of a rank's states."""
    saves: int
    """Of them in long steps."""
    long_seconds: float
    """Compute of a step in which every saver should come to its end."""
    short_seconds: float
    """Compute of a step that is about as long as a save."""
    short_steps: int
    restores: int


@dataclass(frozen=True)
class Save:
    """One save during a long step."""

    begin_seconds: float
    """For which training was held up when the save began."""
    fence_seconds: float
    """For which it was held up before the update."""
    durable_seconds: float | None
    """From the beginning until the checkpoint was on disk and complete; None: nobody knows."""
    compute_share: float | None
    """Compute done until then, of what is done in that time without a save."""
    step_seconds: float
    plain_step_seconds: float
    """Of the step before it, without a save."""


@dataclass(frozen=True)
class SaverFigures:
    """What one rank saw in a turn."""

    saves: tuple[Save, ...]
    short_seconds: float
    """Of all short steps, a save after each, until the last save was complete."""
    plain_short_seconds: float
    """Of as many without saves."""
    restore_seconds: tuple[float, ...]
    """With an empty page cache; none of a saver that gives nothing back."""
    states_bytes: int
    """Of this rank."""
    disk_bytes: int
    """Of a whole checkpoint, all ranks."""


def saver_figures_from(values: dict[str, Any]) -> SaverFigures:
    """Read a rank's figures back from JSON."""
    saves = tuple(Save(**save) for save in values.pop("saves"))
    restores = tuple(values.pop("restore_seconds"))
    return SaverFigures(saves=saves, restore_seconds=restores, **values)


class Compute:
    """Matrix products, one after the other."""

    def __init__(self) -> None:
        self._factors = torch.rand(2, MATRIX, MATRIX)
        self._product = torch.empty(MATRIX, MATRIX)

    def run(self, pieces: int, after_each: Callable[[int], None] = lambda _: None) -> None:
        """Do so many; tell how many are done after each."""
        for done in range(1, pieces + 1):
            torch.mm(*self._factors, out=self._product)
            after_each(done)

    def pieces_per_second(self) -> float:
        """Measure, while the other ranks do the same."""
        dist.barrier()
        pieces, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < CALIBRATION_SECONDS:
            self.run(10)
            pieces += 10
        return pieces / seconds


class Watch:
    """Notices when a save has become durable, and what was computed until then."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.at: float | None = None
        self.pieces = 0

    def look(self, pieces: int) -> None:
        """Ask, having computed so much."""
        if self.at is None and self._saver.is_durable():
            self.at, self.pieces = time.perf_counter(), pieces


class Rank:
    """One rank of a turn. All ranks do the same."""

    def __init__(self, turn: SaverTurn, place: Place) -> None:
        self._turn, self._place = turn, place
        self._states = KnownStates(place.rank, place.ranks, turn.size)
        self._saver: Saver = SAVERS[turn.saver][1](self._states, place)
        self._compute, self._step = Compute(), 0
        speed = torch.tensor(self._compute.pieces_per_second())
        dist.all_reduce(speed, dist.ReduceOp.MIN)  # all ranks compute the same
        self._speed = float(speed)

    def run(self) -> SaverFigures:
        """Take the turn.

        Raises:
            TrainingError: what was read back is not what was saved.
        """
        turn = self._turn
        pieces, short_pieces = (
            max(1, round(seconds * self._speed))
            for seconds in (turn.long_seconds, turn.short_seconds)
        )
        self._long_step(pieces, 0.0)  # the first one allocates
        saves = [self._long_step(pieces, self._plain_steps(pieces, 1)) for _ in range(turn.saves)]
        short, plain = self._short_steps(short_pieces)
        passes = turn.restores if self._saver.gives_back else 0
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

    def _plain_steps(self, pieces: int, steps: int) -> float:
        self._quieten()
        start, computing = time.perf_counter(), 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            self._compute.run(pieces)
            computing += time.perf_counter() - begin
            self._update()
        seconds = time.perf_counter() - start
        self._speed = pieces * steps / computing  # what the next save's compute is held against
        return seconds

    def _long_step(self, pieces: int, plain_step_seconds: float) -> Save:
        """Save, and look all the time whether it is done."""
        self._quieten()
        watch = Watch(self._saver)
        start = time.perf_counter()
        self._saver.save(self._step)
        begun = time.perf_counter()
        watch.look(0)
        self._compute.run(pieces, watch.look)
        computed = time.perf_counter()
        self._saver.fence()
        fenced = time.perf_counter()
        self._update()
        end = time.perf_counter()
        self._saver.settle()
        watch.look(pieces)
        durable = None if watch.at is None else watch.at - start
        return Save(
            begin_seconds=begun - start,
            fence_seconds=fenced - computed,
            durable_seconds=durable,
            compute_share=None if durable is None else watch.pieces / durable / self._speed,
            step_seconds=end - start,
            plain_step_seconds=plain_step_seconds,
        )

    def _short_steps(self, pieces: int) -> tuple[float, float]:
        """Make short steps with a save in each, and as many without; return the seconds."""
        turn = self._turn
        plain = self._plain_steps(pieces, turn.short_steps)
        self._quieten()
        start = time.perf_counter()
        for _ in range(turn.short_steps):
            self._saver.save(self._step)
            self._compute.run(pieces)
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
            raise TrainingError(f"{self._turn.saver} did not give back what it was given")
        return seconds

    def _update(self) -> None:
        self._states.update()
        self._step += 1

    def _quieten(self) -> None:
        """Begin together, with nothing left to be written."""
        os.sync()
        dist.barrier()

    def _files(self) -> list[Path]:
        return [path for path in self._place.folder.rglob("*") if path.is_file()]
