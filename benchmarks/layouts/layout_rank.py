"""Train a layout of planner_layouts.py on one rank, and measure its memory and its steps."""

import gc
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.layouts.layout_case import RANKS
from benchmarks.testbed.foreign_load import busy_seconds
from benchmarks.testbed.held_bytes import HeldBytes
from frontier_llm.config import RunConfig
from frontier_llm.data.batch import AnyBatch, Batch
from frontier_llm.device.accelerator import keep_freed_memory
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import make_groups
from frontier_llm.trainer.states import bare_step
from frontier_llm.trainer.step_measurements import MEASURED_STEPS

LEARNING_RATE = 1e-4
"""Learning rate of all layouts; the speed does not depend on it."""
CPU = torch.device("cpu")


class TimedStep(NamedTuple):
    """One step on one rank."""

    seconds: float
    """Duration."""
    own: float
    """CPU seconds of this rank."""
    busy: float
    """Seconds that all cores of the machine worked together."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured of a layout."""

    peak_bytes: int
    """Peak memory of all tensors, from the first weight to the end of the second step."""
    steps: tuple[TimedStep, ...]
    """The timed steps."""
    phases: dict[str, float]
    """Seconds of each phase of a step, from the steps that the trainer itself measures."""
    losses: tuple[float, ...]
    """Losses of all steps."""


def run_layout(rank: int, config: RunConfig, steps: int) -> RankFigures:
    """Train on one rank: two steps in which the memory is measured, and `steps` timed ones.

    Collective over all ranks. The trainer's own timer measures the phases of the first timed steps.

    Args:
        rank: number of this rank.
        config: configuration of the layout.
        steps: number of timed steps.
    """
    megatron_cpu.install()
    keep_freed_memory()
    layout = ResolvedLayout.resolve(config, RANKS, RANKS)
    groups = make_groups(layout.grid, layout.head_stage)
    batches, losses = _batches(layout, groups.coordinates.data), []
    with HeldBytes() as held:
        _, step = bare_step(config, layout, groups, CPU)
        for number in (1, 2):
            losses.append(step.run(number, batches, LEARNING_RATE).loss)
    gc.collect()
    gc.freeze()  # as in a training run (trainer/assemble.py)
    timed = []
    for number in range(MEASURED_STEPS, MEASURED_STEPS + steps + 1):
        dist.barrier()
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        losses.append(step.run(number, batches, LEARNING_RATE).loss)
        seconds = time.perf_counter() - start
        timed.append(TimedStep(seconds, time.process_time() - own, busy_seconds() - busy))
    # the first of these steps is the last one that the trainer's timer measures
    return RankFigures(held.peak, tuple(timed[1:]), step.timer.laps[-1], tuple(losses))


def _batches(layout: ResolvedLayout, replica: int) -> list[AnyBatch]:
    """Return the micro-batches of a replica, with random tokens."""
    generator = torch.Generator().manual_seed(replica)
    length, samples = layout.sequence_length, layout.micro_batch
    positions = torch.arange(length).expand(samples, -1)
    batches: list[AnyBatch] = []
    for _ in range(layout.micro_batches):
        shape = (samples, length + 1)
        rows = torch.randint(layout.model.vocabulary, shape, generator=generator)
        batches.append(Batch(rows[:, :-1], rows[:, 1:], positions))
    return batches
