"""Creates all process groups of a rank; the only module that reads megatron's global state.

trainer/connect.py calls `make_groups` on each rank. The groups are those of the grid (pipeline,
data and tensor ranks, geometry/grid.py) and those over which model states are sharded.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from frontier_llm.config.collectives import CommunicatorCount
from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.geometry.partition import Factors, Hop
from frontier_llm.parallel.context_ranks import ContextRanks
from frontier_llm.parallel.lanes import leave_lane

TIMEOUT = timedelta(minutes=30)
"""Default time after which a collective fails; it is torch's default for gloo."""
_ABORT = threading.Lock()


@dataclass(frozen=True)
class Groups:
    """This rank's position in the grid and its process groups."""

    grid: Grid
    rank: int
    coordinates: Coordinates
    tensor: dist.ProcessGroup
    """The ranks that differ only in their tensor coordinate."""
    data: dist.ProcessGroup
    """The ranks that differ only in their data coordinate."""
    pipeline: dist.ProcessGroup
    """The ranks that differ only in their pipeline stage. They send each other activations."""
    context: ContextRanks | None
    """The neighbours along the data axis that divide the tokens of a sample; None = no others."""
    head_stage: int
    embedding: dist.ProcessGroup | None
    """The ranks of the first and last stage, which hold tied embeddings; None on other stages."""
    timeout: timedelta

    def seed_dropout(self, seed: int, *, own_masks: bool) -> None:
        """Seed the random numbers from which dropout masks are drawn.

        megatron draws the masks of activations that all tensor ranks hold from one stream, and
        those of activations that are divided between them from another stream. The seed is up to
        2**62 and must be equal on the tensor ranks of a stage and replica. With `own_masks`, as for
        sequence parallelism, the first stream differs between tensor ranks.
        """
        tensor = self.coordinates.tensor
        model_parallel_cuda_manual_seed(
            seed, tp_rank=tensor, ep_rank=0, etp_rank=tensor, force_reset_rng=True
        )
        if own_masks:
            torch.cuda.manual_seed(seed + 1 + tensor)

    @property
    def counts_losses(self) -> bool:
        """Whether this rank reports the losses of the tokens that it reads."""
        return self.has_head and self.coordinates.tensor == 0

    @property
    def has_head(self) -> bool:
        """Whether this rank's stage holds the head."""
        return self.coordinates.pipeline == self.head_stage


def make_groups(
    grid: Grid,
    head_stage: int,
    timeout: timedelta = TIMEOUT,
    communicators: CommunicatorCount = "many",
) -> Groups:
    """Create the process groups of the grid.

    Collective over all ranks, in one fixed order. `torch.distributed` must be initialised. Unless
    `collectives.communicators` is `many`, groups of the same ranks are one group.
    """
    assert dist.group.WORLD is not None
    with _shared_groups(timeout, [dist.group.WORLD] if _shares_world(communicators) else []):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.tensor,
            pipeline_model_parallel_size=grid.pipeline,
            create_gloo_process_groups=False,  # only megatron's optimizer needs them; it is unused
        )
    rank = dist.get_rank()
    position = grid.coordinates(rank)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    _check("tensor", collection.tp, grid.tensor_group(rank))
    _check("data", collection.dp, grid.data_group(rank))
    _check("pipeline", collection.pp, grid.pipeline_group(rank))
    ends = position.pipeline in (0, grid.pipeline - 1)
    groups = Groups(
        grid=grid,
        rank=rank,
        coordinates=position,
        tensor=collection.tp,
        data=collection.dp,
        pipeline=collection.pp,
        context=_context_ranks(grid, rank, timeout, communicators),
        head_stage=head_stage,
        embedding=collection.embd if ends else None,
        timeout=timeout,
    )
    # megatron's layers expect that the random numbers have been seeded once
    groups.seed_dropout(0, own_masks=False)
    return groups


def _context_ranks(
    grid: Grid, rank: int, timeout: timedelta, communicators: CommunicatorCount
) -> ContextRanks | None:
    """Create the groups of context ranks, in one order of all ranks; return this rank's."""
    if grid.context == 1:
        return None
    if grid.context == grid.size and _shares_world(communicators):
        assert dist.group.WORLD is not None
        return ContextRanks(dist.group.WORLD)
    members = sorted({grid.context_group(other) for other in range(grid.size)})
    # a communicator of its own, as collectives of states overlap with the exchange
    own, _ = dist.new_subgroups_by_enumeration(list(map(list, members)), timeout)
    return ContextRanks(own)


def _shares_world(communicators: CommunicatorCount) -> bool:
    """Return whether groups of all ranks are one group. With gloo they have other time limits."""
    return communicators != "many" and dist.get_backend() != "gloo"


@contextmanager
def _shared_groups(timeout: timedelta, existing: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """Make megatron create one group for each set of ranks, within this context.

    megatron creates twenty groups per rank, most of which have the same ranks. A group has one
    thread with gloo and two with NCCL, which wake all the time. megatron would round the timeout up
    to minutes.
    """
    created = {tuple(dist.get_process_group_ranks(group)): group for group in existing}

    def create_group(ranks: Sequence[int], **_: object) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in created:
            created[key] = dist.new_group(list(ranks), timeout=timeout)
        return created[key]

    original = parallel_state.create_group
    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = original


def make_hop_groups(groups: Groups, factors: Factors) -> dict[Hop, dist.ProcessGroup]:
    """Create one group per hop, over which this rank's model states are gathered and reduced.

    Collective over all ranks, in one fixed order. If sums over replicas are not divided, the last
    digit has a single hop (geometry/partition.py).
    """
    return {hop: _hop_group(groups, hop) for hop in factors.collective_hops}


def _hop_group(groups: Groups, hop: Hop) -> dist.ProcessGroup:
    """Create all groups of data ranks that differ only in one hop; return this rank's group."""
    grid = groups.grid
    if hop.width == grid.data:
        return groups.data
    data_groups = sorted({hop.group(data_rank) for data_rank in range(grid.data)})
    members = [
        [grid.rank(Coordinates(tensor, data, pipeline)) for data in data_ranks]
        for pipeline in range(grid.pipeline)
        for tensor in range(grid.tensor)
        for data_ranks in data_groups
    ]
    own, _ = dist.new_subgroups_by_enumeration(members, groups.timeout)
    return own


def make_stage_groups(
    groups: Groups, stage_sets: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """Create groups of ranks of some stages, which hold copies of the same parameter.

    Collective over all ranks, in one fixed order: the sets of stages are ascending and in the same
    order on all ranks. Returns a group for each set that this rank's stage is in; None if the set
    has one stage.
    """
    created = {stages: _stage_group(groups, stages) for stages in stage_sets}
    return {
        stages: group for stages, group in created.items() if groups.coordinates.pipeline in stages
    }


def _stage_group(groups: Groups, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Create a group over some stages for each data and tensor coordinate; return this rank's."""
    grid = groups.grid
    if len(stages) == 1:
        return None
    if stages == (0, grid.pipeline - 1):
        return groups.embedding
    if len(stages) == grid.pipeline:
        return groups.pipeline
    members = [
        [grid.rank(Coordinates(tensor, data, stage)) for stage in stages]
        for data in range(grid.data)
        for tensor in range(grid.tensor)
    ]
    own, _ = dist.new_subgroups_by_enumeration(members, groups.timeout)
    return own


def destroy_groups() -> None:
    """Destroy megatron's groups and torch.distributed."""
    leave_lane()
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):  # megatron keeps it; its threads prevent a fork
            setattr(parallel_state, name, None)
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_groups() -> None:
    """End collectives of NCCL or RCCL that wait for a dead rank; any thread may call this.

    Their kernels occupy the device until the communicators are aborted. A communicator that is
    being created is not reached. gloo has no such call: its connections are cut
    (membership/connections.py). This has not been tried on a GPU.
    """
    with _ABORT:  # a second call waits until the groups are gone
        if dist.is_initialized() and dist.get_backend() != "gloo":
            dist.distributed_c10d._abort_process_group()


def forget_groups() -> None:
    """Let the next groups have the same names on all ranks, also after groups that failed.

    torch counts the groups of a process, and one more if `init_process_group` has failed.
    """
    dist.distributed_c10d._world.group_count = 0


def _check(axis: str, group: dist.ProcessGroup, expected: Sequence[int]) -> None:
    """Check that megatron's group has the ranks that the grid expects."""
    actual = dist.get_process_group_ranks(group)
    if tuple(actual) != tuple(expected):
        raise RuntimeError(f"megatron's {axis} group has ranks {actual}, the grid says {expected}")
