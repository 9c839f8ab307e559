"""The process groups of a rank, made in one place, and the only reader of megatron's globals."""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from frontier_llm.config.parallel import ParallelConfig
from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.geometry.partition import DIGITS, Digit, Factors
from frontier_llm.parallel.megatron_cpu import shared_groups

SEED_STRIDE = 10_007
"""Between the dropout seeds of two ranks: larger than megatron's offsets within one rank."""
TIMEOUT = timedelta(minutes=30)
"""Gloo's own: it notices by itself when a peer is gone."""
STEP_STRIDE = 1_000_000_007
"""Between the dropout seeds of two steps: larger than those of all ranks together."""


@dataclass(frozen=True)
class Groups:
    """Where this rank stands, and the groups it talks in."""

    grid: Grid
    rank: int
    at: Coordinates
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    embedding: dist.ProcessGroup | None
    """First and last stage, which hold a tied embedding; None on the stages between."""
    megatron: ProcessGroupCollection
    """The same groups as megatron's modules take them."""
    timeout: timedelta
    """After which their collectives fail."""

    def seed_dropout(self, seed: int, step: int) -> None:
        """Begin a step's random numbers: a function of (seed, step, place), with no history.

        Every (data, pipeline) rank draws its own masks; tensor ranks share those of what they
        all hold and differ in what they cut. A run that goes on later draws the same ones.
        """
        place = self.at.pipeline * self.grid.data + self.at.data
        model_parallel_cuda_manual_seed(
            (seed + STEP_STRIDE * step + SEED_STRIDE * place) % 2**63,
            tp_rank=self.at.tensor,
            ep_rank=0,
            etp_rank=self.at.tensor,
            force_reset_rng=True,
        )

    @property
    def is_between(self) -> bool:
        """Whether stages come before and after this one."""
        return 0 < self.at.pipeline < self.grid.pipeline - 1

    @property
    def counts_samples(self) -> bool:
        """Whether this rank speaks for its replica's samples and their loss."""
        return self.is_last_stage and self.at.tensor == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's stage holds the head."""
        return self.at.pipeline == self.grid.pipeline - 1


def make_groups(
    parallel: ParallelConfig, ranks_per_node: int, seed: int, timeout: timedelta = TIMEOUT
) -> Groups:
    """Make all process groups.

    Collective over all ranks, in one fixed order. `torch.distributed` must be initialised.

    Args:
        parallel: sizes of the tensor and pipeline axes.
        ranks_per_node: where a node ends.
        seed: of dropout.
        timeout: after which a collective fails; for megatron's groups in whole minutes.
    """
    with shared_groups() if dist.get_backend() == "gloo" else nullcontext():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.chunks if parallel.chunks > 1 else None,
            distributed_timeout_minutes=math.ceil(timeout / timedelta(minutes=1)),
            create_gloo_process_groups=False,  # for its optimizer alone, which is not used
        )
    size, rank = dist.get_world_size(), dist.get_rank()
    grid = Grid(
        parallel.tensor,
        size // (parallel.tensor * parallel.pipeline),
        parallel.pipeline,
        ranks_per_node,
    )
    at = grid.coordinates(rank)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    _check("tensor", collection.tp, grid.tensor_group(rank))
    _check("data", collection.dp, grid.data_group(rank))
    _check("pipeline", collection.pp, grid.pipeline_group(rank))
    ends = at.pipeline in (0, grid.pipeline - 1)
    groups = Groups(
        grid=grid,
        rank=rank,
        at=at,
        tensor=collection.tp,
        data=collection.dp,
        pipeline=collection.pp,
        embedding=collection.embd if ends else None,
        megatron=collection,
        timeout=timeout,
    )
    groups.seed_dropout(seed, step=0)
    return groups


def make_digit_groups(groups: Groups, factors: Factors) -> dict[Digit, dist.ProcessGroup | None]:
    """Make the groups along which this rank's model states are gathered and added up.

    Collective over all ranks, in one fixed order.

    Args:
        groups: where this rank stands.
        factors: how states are cut over the data axis.

    Returns:
        One group a digit of the data rank; None where the digit has one value.
    """
    return {digit: _digit_group(groups, factors, digit) for digit in DIGITS}


def _digit_group(groups: Groups, factors: Factors, digit: Digit) -> dist.ProcessGroup | None:
    width, grid = factors.width(digit), groups.grid
    if width == 1:
        return None
    if width == grid.data:
        return groups.data
    mine = None
    lines = sorted({factors.group(digit, rank) for rank in range(grid.data)})
    for pipeline in range(grid.pipeline):
        for tensor in range(grid.tensor):
            for line in lines:
                ranks = [grid.rank(Coordinates(tensor, data, pipeline)) for data in line]
                group = dist.new_group(ranks, timeout=groups.timeout)
                if groups.rank in ranks:
                    mine = group
    return mine


def make_stage_groups(
    groups: Groups, stage_sets: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """Make the groups that join some stages of a pipeline, for parameters they hold copies of.

    Collective over all ranks, in one fixed order.

    Args:
        groups: where this rank stands.
        stage_sets: ascending stages each, in the same order on all ranks.

    Returns:
        The sets that this rank's stage belongs to; None where it is alone.
    """
    made = {stages: _stage_group(groups, stages) for stages in stage_sets}
    return {stages: group for stages, group in made.items() if groups.at.pipeline in stages}


def _stage_group(groups: Groups, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
    grid = groups.grid
    if len(stages) == 1:
        return None
    if stages == (0, grid.pipeline - 1):
        return groups.embedding
    mine = None
    for data in range(grid.data):
        for tensor in range(grid.tensor):
            ranks = [grid.rank(Coordinates(tensor, data, stage)) for stage in stages]
            group = dist.new_group(ranks, timeout=groups.timeout)
            if groups.rank in ranks:
                mine = group
    return mine


def destroy_groups() -> None:
    """Forget megatron's groups and end torch.distributed."""
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):  # it leaves some, whose threads end with a fork
            setattr(parallel_state, name, None)
    if dist.is_initialized():
        dist.destroy_process_group()


def _check(axis: str, group: dist.ProcessGroup, expected: Sequence[int]) -> None:
    """Hold megatron's idea of the grid against ours: everything else relies on it."""
    actual = dist.get_process_group_ranks(group)
    if tuple(actual) != tuple(expected):
        raise RuntimeError(f"megatron's {axis} group is {actual}, the grid says {expected}")
