"""A case of bench_pipeline: its settings and contenders, and what a rank measures of them."""

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.pipeline.megatron_schedules import MegatronPipeline
from benchmarks.testbed.bare_steps import (
    CPU,
    LEARNING_RATE,
    freeze_objects,
    prepare_cpu,
    random_batches,
)
from benchmarks.testbed.held_bytes import HeldBytes
from benchmarks.testbed.shape import Shape
from frontier_llm.cli.compose import compose
from frontier_llm.config import RunConfig, decode
from frontier_llm.data.batch import Batch
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.parallel.groups import Groups, make_groups
from frontier_llm.trainer.pipeline import Pipeline
from frontier_llm.trainer.states import bare_step

MESSAGES = 50
"""Messages that are timed in each direction."""


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule, and the program that runs it."""

    schedule: str
    """Value of `parallel.schedule`."""
    chunks: int
    """Model chunks per stage."""
    waits: bool = False
    """Whether weight gradients wait, although the schedule itself does not split backward
    passes."""
    is_megatron: bool = False
    """Whether megatron-core runs it, and not frontier_llm."""


CONTENDERS = {
    "megatron-1f1b": Schedule("1f1b", 1, is_megatron=True),
    "1f1b": Schedule("1f1b", 1),
    "1f1b-waiting": Schedule("1f1b", 1, waits=True),
    "zb_h1": Schedule("zb_h1", 1),
    "megatron-interleaved": Schedule("interleaved", 2, is_megatron=True),
    "interleaved": Schedule("interleaved", 2),
    "interleaved-waiting": Schedule("interleaved", 2, waits=True),
    "zb_v": Schedule("zb_v", 2),
    "v_half": Schedule("v_half", 2),
}
"""All contenders, in the order of their turns."""


@dataclass(frozen=True)
class Case:
    """Settings under which the contenders are compared."""

    ranks: int
    """One for each pipeline stage."""
    micro_batches: int
    """Micro-batches per step, of one sample each."""
    sizes: Shape
    waiting: int
    """Limit of waiting weight gradients for the contenders that let them wait."""
    rounds: int
    """Timed steps of each contender."""
    recompute: str = "none"

    @property
    def contenders(self) -> dict[str, Schedule]:
        """The contenders. Several model chunks need a micro-batch for each stage."""
        return {
            name: contender
            for name, contender in CONTENDERS.items()
            if contender.chunks == 1 or self.micro_batches >= self.ranks
        }

    def config(self, contender: Schedule) -> RunConfig:
        """Return the configuration of a contender."""
        overrides = [
            *self.sizes.overrides(),
            "model.tied=false",
            "data.micro_batch=1",
            f"data.global_batch={self.micro_batches}",
            "precision=fp32",
            f"recompute={self.recompute}",
            f"parallel.pipeline={self.ranks}",
            f"parallel.schedule={contender.schedule}",
            f"parallel.chunks={contender.chunks}",
            f"parallel.waiting_weights={self.waiting if contender.waits else 0}",
        ]
        config: RunConfig = decode(compose(overrides))
        return config


@dataclass(frozen=True)
class TimedStep:
    """One step on one rank."""

    seconds: float
    actions: tuple[tuple[float, float], ...]
    """Start and end of each action of the schedule in seconds since a moment that is the same on
    all ranks; empty if megatron runs the schedule."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured of one contender; losses and norms are those of all steps."""

    steps: tuple[TimedStep, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    peak_bytes: int
    """Peak memory of the tensors that are allocated in the passes of a step."""


def run_case(rank: int, case: Case) -> tuple[float, dict[str, RankFigures]]:
    """Measure all contenders; return the seconds of a message, and what was measured.

    In the first step of each contender its memory is measured. The others are timed.
    """
    prepare_cpu()
    runners: dict[str, _Runner] = {}
    for name, contender in case.contenders.items():
        first = next(iter(runners.values()), None)
        runners[name] = _Runner(case, contender, first.groups if first else None)
    sizes = case.sizes
    latency = message_seconds(rank, torch.empty(sizes.sequence, 1, sizes.hidden))
    batches = random_batches(next(iter(runners.values())).layout)
    for runner in runners.values():
        runner.measure_memory(batches)
    freeze_objects()
    for index in range(case.rounds):
        for runner in list(runners.values())[:: -1 if index % 2 else 1]:
            runner.time(batches)
    return latency, {name: runner.figures() for name, runner in runners.items()}


def message_seconds(rank: int, tensor: torch.Tensor) -> float:
    """Return the median seconds of a message between the first two ranks, on an idle pipeline.

    Collective over all ranks; the result is the same on all.
    """
    seconds = []
    for _ in range(MESSAGES):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        seconds.append((time.perf_counter() - start) / 2)
    result = torch.tensor(statistics.median(seconds))
    dist.broadcast(result, 0)
    return float(result)


class _Runner:
    """The training steps of one contender on one rank, in new process groups or in given ones."""

    def __init__(self, case: Case, contender: Schedule, groups: Groups | None) -> None:
        config = case.config(contender)
        self.layout = layout = ResolvedLayout.resolve(
            config, case.ranks, case.ranks, precision="fp32"
        )
        if groups is None:
            self.groups = make_groups(layout.grid, layout.head_stage)
        else:
            self.groups = replace(groups, head_stage=layout.head_stage)
        model, self._step = bare_step(config, layout, self.groups, CPU)
        if contender.is_megatron:
            self._step._pipeline = cast(Pipeline, MegatronPipeline(model))
        self._number = 0
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._steps: list[TimedStep] = []
        self._peak_bytes = 0

    def step(self, batches: list[Batch]) -> None:
        """Run one step."""
        self._number += 1
        result = self._step.run(self._number, batches, LEARNING_RATE)
        self._losses.append(result.loss)
        self._grad_norms.append(result.grad_norm)

    def measure_memory(self, batches: list[Batch]) -> None:
        """Run one step, and measure the memory of its passes."""
        held, pipeline = HeldBytes(), self._step._pipeline
        passes = pipeline.train

        def train(*arguments: Any) -> list[torch.Tensor]:
            with held:
                return passes(*arguments)

        with patch.object(pipeline, "train", train):
            self.step(batches)
        self._peak_bytes = held.peak

    def time(self, batches: list[Batch]) -> None:
        """Run one step, and time it and its actions."""
        times = self._step.timer.passes
        times.measure(CPU)
        dist.barrier()
        start = time.perf_counter()
        self.step(batches)
        seconds = time.perf_counter() - start
        self._steps.append(TimedStep(seconds, tuple(times.seconds)))

    def figures(self) -> RankFigures:
        """Return what was measured."""
        losses, grad_norms = tuple(self._losses), tuple(self._grad_norms)
        return RankFigures(tuple(self._steps), losses, grad_norms, self._peak_bytes)
