"""Takes the place of a run's checkpoint manager: saves by a schedule with any saver, and measures.

The run asks for a checkpoint after every step (checkpoint.every_steps=1). The schedule says which
of these steps are saved. At the end of a phase the manager waits until the last checkpoint is
durable on all ranks.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.checkpoint_savers import Place, Saver
from benchmarks.saved_training.save_phases import WARM_UP_STEPS, Schedule
from benchmarks.saved_training.training_savers import OURS, PEERS, TrainedStates
from frontier_llm.checkpoint.discovery import newest
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manager_options import Outcome
from frontier_llm.checkpoint.restore import load
from frontier_llm.errors import TrainingError
from frontier_llm.protocols import StateShard

SAVED_IN_WARM_UP = 2
"""The first steps of the warm-up, which are saved: the first save allocates memory."""


@dataclass
class PhaseFigures:
    """Measurements of one rank in a phase."""

    steps_seconds: float = 0.0
    """Time of all steps, with the time for which saves blocked them."""
    total_seconds: float = 0.0
    """The same until the last checkpoint was durable on all ranks."""
    blocked_seconds: list[float] = field(default_factory=list)
    """For each save: the time of its start and of the fence before the next update. A save after
    the last step is left out, because no computation follows it."""


@dataclass(frozen=True)
class RankFigures:
    """Measurements of one rank in a run."""

    states_bytes: int
    """Size of the rank's states in bytes."""
    phases: tuple[PhaseFigures, ...]


class EngineSaver(Saver):
    """The run's own manager as a saver."""

    def __init__(self, manager: CheckpointManager, states: TrainedStates, place: Place) -> None:
        super().__init__(states, place)
        self._manager, self.meta = manager, dict[str, Any]()

    def save(self, step: int) -> None:
        """Start a checkpoint."""
        self._manager.begin(step, self._states.shards, self.meta)

    def fence(self) -> None:
        """Copy what is not written yet."""
        self._manager.fence()

    def settle(self) -> None:
        """Wait for the commit."""
        self._manager.fence()
        self._manager.wait()

    def restore(self) -> None:
        """Load the newest checkpoint with its digests verified."""
        checkpoint = newest(self._place.folder)
        assert checkpoint is not None
        load(checkpoint, self._states.shards)


class ScheduledManager:
    """Has the methods of `CheckpointManager` that a run with one level of checkpoints calls.

    Attributes:
        outcomes: how checkpoints ended; steps that the schedule leaves out are `skipped`.
    """

    def __init__(self, saver: str, schedule: Schedule, results: Path, *arguments: Any) -> None:
        """Make the saver of a rank. Collective over all ranks.

        Args:
            saver: one of `SAVERS`.
            schedule: the phases of the run.
            results: folder for the measurements of all ranks.
            arguments: those of `CheckpointManager`.
        """
        folder, rank, ranks, store = arguments[:4]
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(rank, ranks, store, folder)
        self._states = TrainedStates(rank)
        self._manager = CheckpointManager(*arguments) if saver == OURS else None
        self._engine: EngineSaver | None = None
        if self._manager is not None:
            self._engine = EngineSaver(self._manager, self._states, place)
        self._saver: Saver = self._engine or PEERS[saver](self._states, place)
        self._schedule, self._name = schedule, saver
        self._results = results / f"{rank}.json"
        self.outcomes: dict[int, Outcome] = self._manager.outcomes if self._manager else {}
        self._phases = [PhaseFigures() for _ in schedule.phases]
        self._open: PhaseFigures | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._start = 0.0

    failed = is_writing = False

    def take_stall_seconds(self) -> float:
        """Return 0: this object writes its own measurements."""
        return 0.0

    def prepare(self, shards: Iterable[StateShard]) -> None:
        """Allocate host memory for our saver; the others allocate it at the first save."""
        self._states.take(shards)
        if self._manager is not None:
            self._manager.prepare(self._states.shards)

    def begin(self, step: int, shards: Iterable[StateShard], meta: dict[str, Any]) -> None:
        """Save if the schedule says so, and measure. A run calls this after every step."""
        ended = time.perf_counter()
        self._states.take(shards)
        if self._engine is not None:
            self._engine.meta = meta
        index, number = self._schedule.place(step)
        self.outcomes[step] = "skipped"
        if index is None:
            self._warm_up(step, number)
            return
        phase, figures = self._schedule.phases[index], self._phases[index]
        if phase.is_due(number):
            self._saver.save(step)
            if number < phase.steps:
                figures.blocked_seconds.append(time.perf_counter() - ended)
                self._open = figures
        if number == phase.steps:
            figures.steps_seconds = time.perf_counter() - self._start
            self._saver.fence()
            self._saver.settle()
            dist.barrier()
            figures.total_seconds = time.perf_counter() - self._start
            self._start_phase()

    def fence(self) -> None:
        """Wait until the states may change; the time counts for the save before."""
        start = time.perf_counter()
        self._saver.fence()
        if self._open is not None:
            self._open.blocked_seconds[-1] += time.perf_counter() - start
            self._open = None

    def wait(self) -> None:
        """Wait for the last save."""
        self._saver.settle()

    def poll(self) -> None:
        """Do nothing: a peer's error ends the run at once."""

    def close(self) -> None:
        """Write the measurements."""
        self.fence()
        self._saver.settle()
        self._saver.close()
        figures = RankFigures(self._states.size, tuple(self._phases))
        self._results.write_text(json.dumps(asdict(figures)))

    def _start_phase(self) -> None:
        """Wait for pending writes and for all ranks."""
        os.sync()
        dist.barrier()
        self._start = time.perf_counter()

    def _warm_up(self, step: int, number: int) -> None:
        """Save the first steps, and check the second checkpoint after two more updates."""
        if 1 <= number <= SAVED_IN_WARM_UP:
            self._saver.settle()
            self._copies = {name: t.clone() for name, t in self._states.tensors.items()}
            self._saver.save(step)
        if number == WARM_UP_STEPS:
            self._saver.settle()
            dist.barrier()
            self._check()
            self._start_phase()

    def _check(self) -> None:
        """Restore the checkpoint into new tensors, and compare them with the copies.

        The states themselves must not be overwritten: their updated parameters may still be on the
        way to other ranks.

        Raises:
            TrainingError: the checkpoint differs from the states at its save.
        """
        shards, empty = self._states.shards, [_emptied(shard) for shard in self._states.shards]
        self._states.take(empty)
        self._saver.restore()
        restored = self._states.tensors
        self._states.take(shards)
        if not all(torch.equal(restored[name], copy) for name, copy in self._copies.items()):
            raise TrainingError(f"{self._name} did not restore what it saved")
        self._copies = {}


def _emptied(shard: StateShard) -> StateShard:
    """Return a shard of the same ranges whose states are 0, as those of padding are."""
    states = {name: torch.zeros_like(tensor) for name, tensor in shard.tensors.items()}
    return StateShard(shard.record, shard.start, states)


def figures_of(file: Path) -> RankFigures:
    """Return the measurements that a rank has written."""
    content = json.loads(file.read_text())
    phases = tuple(PhaseFigures(**phase) for phase in content["phases"])
    return RankFigures(content["states_bytes"], phases)
