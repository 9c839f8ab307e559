"""Training runs of checkpoint_in_training.py: one run per number of ranks, saver and round."""

import json
import os
import resource
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.faults.kill_loop import train
from benchmarks.faults.kills.forked_run import ForkedRun
from benchmarks.saved_training.save_phases import Schedule
from benchmarks.saved_training.scheduled_manager import RankFigures, ScheduledManager, figures_of
from benchmarks.testbed.foreign_load import busy_seconds
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.trainer import checkpoint_levels

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


@dataclass(frozen=True)
class RunFigures:
    """Measurements of a run."""

    ranks: tuple[RankFigures, ...]
    losses: tuple[float, ...]
    """Loss of each step."""
    wall_seconds: float
    load: tuple[float, float, float]
    """Load averages of the machine before the run, over 1, 5 and 15 minutes."""
    other_cores: float
    """Mean number of cores that other programs used during the run."""

    @property
    def states_bytes(self) -> int:
        """Size of a checkpoint of all ranks in bytes."""
        return sum(rank.states_bytes for rank in self.ranks)

    def steps_seconds(self, phase: int) -> float:
        """Time of all steps of a phase; the slowest rank counts."""
        return max(rank.phases[phase].steps_seconds for rank in self.ranks)

    def total_seconds(self, phase: int) -> float:
        """Time of a phase until its last checkpoint was durable; the slowest rank counts."""
        return max(rank.phases[phase].total_seconds for rank in self.ranks)

    def blocked_seconds(self, phase: int) -> float:
        """Median over the saves of a phase; the slowest rank of a save counts."""
        by_rank = (rank.phases[phase].blocked_seconds for rank in self.ranks)
        return statistics.median(max(save) for save in zip(*by_rank, strict=True))


def run(
    saver: str, size: Size, schedule: Schedule, data: Sequence[str], folder: Path
) -> RunFigures:
    """Train once with a saver; return the measurements.

    Args:
        saver: one of `SAVERS`.
        size: number of ranks, and the size of the model and the batch.
        schedule: the phases.
        data: overrides that name the corpus.
        folder: folder for the run, which is empty before and after it.

    Raises:
        TrainingError: the run failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    results = folder / "results"
    results.mkdir(parents=True)
    places = (f"run.dir={folder}/run", f"trainer.steps={schedule.steps}")
    load, busy, start = os.getloadavg(), busy_seconds() - _own_seconds(), time.monotonic()
    forked = ForkedRun(
        partial(_train, saver, schedule, results),
        (*OVERRIDES, *size.overrides, *data, *places),
        folder / "log",
    )
    try:
        forked.wait_for_end()
    finally:
        forked.end()
    seconds = time.monotonic() - start
    busy = busy_seconds() - _own_seconds() - busy
    if forked.exit_code():
        raise TrainingError(f"{saver} failed:\n{(folder / 'log').read_text()[-4000:]}")
    lines = (folder / "run" / METRICS_FILE).read_text().splitlines()
    ranks = tuple(figures_of(results / f"{rank}.json") for rank in range(size.ranks))
    losses = tuple(json.loads(line)["loss"] for line in lines)
    shutil.rmtree(folder)
    return RunFigures(ranks, losses, seconds, load, max(0.0, busy / seconds))


def _own_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def _train(saver: str, schedule: Schedule, results: Path, overrides: Sequence[str]) -> int:
    """Train in this process and its forks, whose checkpoints `ScheduledManager` writes."""
    manager = partial(ScheduledManager, saver, schedule, results)
    checkpoint_levels.CheckpointManager = manager  # type: ignore[assignment,misc]
    return train(overrides)
