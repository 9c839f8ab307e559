"""Training runs of checkpoint_in_training.py, whose checkpoints any saver writes.

A `ScheduledManager` takes the place of a run's checkpoint manager. The run asks for a checkpoint
after every step (checkpoint.every_steps=1); a schedule says which of these steps are saved. At the
end of a phase the manager waits until the last checkpoint is durable on all ranks.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.savers import PEERS, Ours, Place, Saver
from benchmarks.testbed.forked_run import ForkedRun, train
from frontier_lab.calibration.foreign_load import busy_seconds, own_seconds
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.writer import Outcome
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.protocols import StateShard
from frontier_llm.saving import tier_writers
from frontier_llm.telemetry.history import History

OURS = "ours"
"""The run's own saver."""
WARM_UP_STEPS, SAVED_IN_WARM_UP = 4, 2
"""Steps of the first phase. The first two are saved, the first of which allocates memory; the other
two change the states, before the checkpoint of the second step is compared with a copy."""
VOCABULARY = 384
OVERRIDES = (
    f"model.vocabulary={VOCABULARY}", "data=text", f"data.vocabulary={VOCABULARY}",
    "data.micro_batch=1", "parallel.pipeline=1", "sharding=zero1", "precision=fp32",
    "launch.threads=1", "checkpoint=lazy", "checkpoint.every_steps=1", "checkpoint.keep=1",
    "run.resume=never", "plan=off", "trainer.evaluate_every_steps=null",
    "trainer.evaluate_batches=1", "trainer.sample_tokens=0", "telemetry.wandb=off",
    "telemetry.progress=false",
)  # fmt: skip
"""Settings of every run. Every rank computes with one thread and holds 1/ranks of the states."""


@dataclass(frozen=True)
class Phase:
    """Consecutive steps with one interval between saves."""

    steps: int
    every: int
    """Steps from one save to the next; 0: no saves."""

    def is_due(self, number: int) -> bool:
        """Return whether step `number` of the phase, counted from 1, is saved: 1, 1 + every, ..."""
        return self.every > 0 and (number - 1) % self.every == 0


@dataclass(frozen=True)
class Schedule:
    """A run: a warm-up, phases that are measured, and a last step that is not."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, intervals: Sequence[int], steps: int) -> "Schedule":
        """Return a run whose first phase has no saves, and which then has a phase per interval.

        A phase with saves has at least `steps` steps, and whole intervals.
        """
        saved = (Phase(-(-steps // every) * every, every) for every in intervals)
        return cls((Phase(steps, 0), *saved))

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return WARM_UP_STEPS + sum(phase.steps for phase in self.phases) + 1

    def place(self, step: int) -> tuple[int | None, int]:
        """Return the index of a step's phase and the number of the step in it, counted from 1.

        The index is None in the warm-up, whose steps have the numbers 1 to WARM_UP_STEPS, and after
        the last phase, where the number is 0.
        """
        if step <= WARM_UP_STEPS:
            return None, step
        number = step - WARM_UP_STEPS
        for index, phase in enumerate(self.phases):
            if number <= phase.steps:
                return index, number
            number -= phase.steps
        return None, 0


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


class TrainedStates:
    """The states that one rank of a training run saves."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.shards: list[StateShard] = []

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """[elements] fp32 by a name that no other rank uses; only the peers need names."""
        return {
            f"{shard.record.name}.{shard.start}.{name}.{self._rank}": tensor
            for shard in self.shards
            for name, tensor in shard.tensors.items()
        }

    @property
    def size(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def take(self, shards: Iterable[StateShard]) -> None:
        """Take the shards that the run passes at a save."""
        self.shards = list(shards)
        self.__dict__.pop("tensors", None)


class ScheduledManager:
    """Has the methods of `CheckpointManager` that a run with one level of checkpoints calls.

    `results` is the folder for the measurements, and the arguments after it are those of
    `CheckpointManager`. Making it is collective over all ranks.
    """

    failed = is_writing = False

    def __init__(self, saver: str, schedule: Schedule, results: Path, *arguments: Any) -> None:
        folder, ranks = arguments[:2]
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(ranks.rank, ranks.size, ranks.store, folder)
        self._states = TrainedStates(ranks.rank)
        self._manager = CheckpointManager(*arguments) if saver == OURS else None
        self._saver: Saver
        if self._manager is not None:
            self._saver = Ours(self._states, place, self._manager)
        else:
            self._saver = PEERS[saver](self._states, place)
        self._schedule, self._name = schedule, saver
        self._results = results / f"{ranks.rank}.json"
        self.outcomes: dict[int, Outcome] = self._manager.outcomes if self._manager else {}
        self._phases = [PhaseFigures() for _ in schedule.phases]
        self._open: PhaseFigures | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._start = 0.0

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
        if isinstance(self._saver, Ours):
            self._saver.meta = meta
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
        """Save the first steps, and check the second checkpoint after two more updates.

        It is restored into new tensors: updated parameters may still be on the way to other ranks.

        Raises:
            TrainingError: the checkpoint differs from the states at its save.
        """
        if 1 <= number <= SAVED_IN_WARM_UP:
            self._saver.settle()
            self._copies = {name: t.clone() for name, t in self._states.tensors.items()}
            self._saver.save(step)
        if number == WARM_UP_STEPS:
            self._saver.settle()
            dist.barrier()
            shards = self._states.shards
            self._states.take(map(_emptied, shards))
            self._saver.restore()
            restored, copies = self._states.tensors, self._copies
            self._states.take(shards)
            if not all(torch.equal(restored[name], copy) for name, copy in copies.items()):
                raise TrainingError(f"{self._name} did not restore what it saved")
            self._copies = {}
            self._start_phase()


def _emptied(shard: StateShard) -> StateShard:
    """Return a shard of the same ranges whose states are 0, as those of padding are."""
    states = {name: torch.zeros_like(tensor) for name, tensor in shard.tensors.items()}
    return StateShard(shard.record, shard.start, states)


@dataclass(frozen=True)
class RankFigures:
    """Measurements of one rank in a run."""

    states_bytes: int
    """Size of the rank's states."""
    phases: tuple[PhaseFigures, ...]


@dataclass(frozen=True)
class RunFigures:
    """Measurements of a run."""

    ranks: tuple[RankFigures, ...]
    losses: tuple[float, ...]
    """Loss of each step."""
    other_cores: float
    """Mean number of cores that other programs used during the run."""

    @property
    def states_bytes(self) -> int:
        """Size of a checkpoint of all ranks."""
        return sum(rank.states_bytes for rank in self.ranks)

    def slowest(self, phase: int, name: str) -> float:
        """Return the largest value of all ranks in a phase."""
        return max(getattr(rank.phases[phase], name) for rank in self.ranks)

    def blocked_seconds(self, phase: int) -> float:
        """Return the median over the saves of a phase; the slowest rank of a save counts."""
        by_rank = (rank.phases[phase].blocked_seconds for rank in self.ranks)
        return median(max(save) for save in zip(*by_rank, strict=True))


@dataclass(frozen=True)
class Size:
    """Size of a run with a number of ranks; the model grows with the number of ranks."""

    ranks: int
    megabytes: float
    """Least states per rank in millions of bytes."""
    hidden: int
    tokens: int
    """Tokens per step of all ranks."""

    @property
    def layers(self) -> int:
        """Number of layers, of 12 hidden^2 parameters each."""
        layer_bytes = STATE_BYTES * 12 * self.hidden**2
        return max(1, -(-round(self.ranks * self.megabytes * 1e6) // layer_bytes))

    @property
    def overrides(self) -> tuple[str, ...]:
        """The command line."""
        return (
            f"launch.ranks={self.ranks}",
            f"model.layers={self.layers}",
            f"model.hidden={self.hidden}",
            f"model.heads={max(2, self.hidden // 64)}",
            f"data.sequence_length={max(8, self.tokens // self.ranks)}",
            f"data.global_batch={self.ranks}",
        )


def run(
    saver: str, size: Size, schedule: Schedule, data: Sequence[str], folder: Path
) -> RunFigures:
    """Train once with a saver; return the measurements.

    `data` are the overrides that name the corpus; the folder is empty before and after the run.

    Raises:
        TrainingError: the run failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    results = folder / "results"
    results.mkdir(parents=True)
    places = (f"run.dir={folder}/run", f"trainer.steps={schedule.steps}")
    busy, start = busy_seconds() - own_seconds(), time.monotonic()
    overrides = (*OVERRIDES, *size.overrides, *data, *places)
    ForkedRun(partial(_train, saver, schedule, results), overrides, folder / "log").finish(saver)
    other_cores = (busy_seconds() - own_seconds() - busy) / (time.monotonic() - start)
    ranks = []
    for rank in range(size.ranks):
        found = json.loads((results / f"{rank}.json").read_text())
        phases = tuple(PhaseFigures(**phase) for phase in found["phases"])
        ranks.append(RankFigures(found["states_bytes"], phases))
    losses = tuple(History.read(folder / "run").column("loss"))
    shutil.rmtree(folder)
    return RunFigures(tuple(ranks), losses, max(0.0, other_cores))


def _train(saver: str, schedule: Schedule, results: Path, overrides: Sequence[str]) -> int:
    """Train in this process and its forks, whose checkpoints `ScheduledManager` writes."""
    manager = partial(ScheduledManager, saver, schedule, results)
    tier_writers.CheckpointManager = manager  # type: ignore[assignment,misc]
    return train(overrides)
