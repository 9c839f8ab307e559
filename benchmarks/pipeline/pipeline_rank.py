"""Run one rank of a case of bench_pipeline: all contenders take turns in its process."""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from benchmarks.pipeline.megatron_schedules import MegatronPipeline
from benchmarks.pipeline.pipeline_case import Case, Contender, RankFigures, TimedStep
from benchmarks.testbed.held_bytes import HeldBytes
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.data.batch import AnyBatch, Batch
from frontier_llm.device.accelerator import keep_freed_memory
from frontier_llm.device.kernels import resolve
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.build import build_model
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import make_groups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.pipeline import DropoutSeeds, Pipeline
from frontier_llm.trainer.progress import LossScale
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep

LEARNING_RATE = 1e-4
"""Learning rate of all contenders; the speed does not depend on it."""
MESSAGES = 50
"""Messages that are timed in each direction."""
CPU = torch.device("cpu")


def run_case(rank: int, case: Case) -> tuple[float, dict[str, RankFigures]]:
    """Measure all contenders; return the seconds of a message, and what was measured.

    In the first step of each contender its memory is measured. The others are timed.
    """
    megatron_cpu.install()
    keep_freed_memory()
    contenders: dict[str, _Runner] = {}
    for name, contender in case.contenders.items():
        groups_of = next(iter(contenders.values()), None)
        contenders[name] = _Runner(case, contender, rank, groups_of)
    sizes = case.sizes
    latency = message_seconds(rank, torch.empty(sizes.sequence, 1, sizes.hidden))
    batches = random_batches(case)
    for runner in contenders.values():
        runner.measure_memory(batches)
    gc.collect()
    gc.freeze()  # as in a training run (trainer/assemble.py)
    for _ in range(case.rounds):
        for runner in contenders.values():
            runner.time(batches)
    return latency, {name: runner.figures() for name, runner in contenders.items()}


def message_seconds(rank: int, tensor: torch.Tensor) -> float:
    """Return the median seconds of a message between the first two ranks, on an idle pipeline.

    Collective over all ranks; the result is the same on all.

    Args:
        rank: number of this rank.
        tensor: the message.
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


def random_batches(case: Case) -> list[AnyBatch]:
    """Return the micro-batches of a step, with random tokens that are the same on all ranks."""
    sizes, generator = case.sizes, torch.Generator().manual_seed(1)
    positions = torch.arange(sizes.sequence)[None]
    rows = torch.randint(
        sizes.vocabulary, (case.micro_batches, 1, sizes.sequence + 1), generator=generator
    )
    return [Batch(row[:, :-1], row[:, 1:], positions) for row in rows]


class _Runner:
    """The training steps of one contender on one rank."""

    def __init__(
        self, case: Case, contender: Contender, rank: int, groups_of: "_Runner | None"
    ) -> None:
        """Build the model and its states.

        Collective over all ranks.

        Args:
            case: settings.
            contender: the contender.
            rank: number of this rank.
            groups_of: a contender whose process groups are used; None = make new ones.
        """
        config = case.config(contender)
        layout = ResolvedLayout.resolve(config, case.ranks, case.ranks, precision="fp32")
        if groups_of is None:
            self.groups = make_groups(layout.grid, layout.head_stage)
        else:
            self.groups = replace(groups_of.groups, head_stage=layout.head_stage)
        kernels = resolve(config.kernels, CPU)
        model = build_model(layout, self.groups, CPU, kernels, config.trainer.seed)
        traffic = Traffic(self.groups.grid, rank)
        states = shard(config, model, self.groups, traffic)
        scale = LossScale(config.precision, "fp32")
        self._step = TrainStep(model, states, self.groups, config, scale, traffic)
        if contender.is_megatron:
            self._step._pipeline = cast(Pipeline, MegatronPipeline(model))
        self._number = 0
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._steps: list[TimedStep] = []
        self._peak_bytes = 0

    def step(self, batches: list[AnyBatch]) -> None:
        """Run one step."""
        self._number += 1
        result = self._step.run(self._number, batches, LEARNING_RATE)
        self._losses.append(result.loss)
        self._grad_norms.append(result.grad_norm)

    def measure_memory(self, batches: list[AnyBatch]) -> None:
        """Run one step, and measure the memory of its passes."""
        pipeline = self._step._pipeline
        measured = _MeasuredMemory(pipeline)
        self._step._pipeline = cast(Pipeline, measured)
        self.step(batches)
        self._step._pipeline, self._peak_bytes = pipeline, measured.peak_bytes

    def time(self, batches: list[AnyBatch]) -> None:
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


class _MeasuredMemory:
    """Runs the passes of another pipeline, and measures their memory."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.peak_bytes = 0

    def train(
        self,
        batches: Sequence[AnyBatch],
        states: ShardedStates,
        dropout: DropoutSeeds,
        loss_scale: float,
    ) -> list[torch.Tensor]:
        """Run the passes of a step, as `Pipeline.train`."""
        with HeldBytes() as held:
            losses = self._pipeline.train(batches, states, dropout, loss_scale)
        self.peak_bytes = held.peak
        return losses
