"""List the NCCL or RCCL communicators of a rank, and count the device memory of their buffers.

The list is the one account of communicators: trainer/connect.py creates and tests exactly these
before the first step, a step uses them, and the planner counts them. A process group that is not in
the list has no communicator and takes no device memory, because torch creates the communicator of a
group at its first collective.

A communicator has buffers per channel and per connection to another rank. Collectives connect a
rank with its two neighbours in rings and trees; an all-to-all connects it with every other rank. A
stage of a pipeline is connected with the stages that it exchanges messages with, in one
communicator of the pipeline (parallel/stage_exchange.py). Groups of the same ranks of a pipeline
are one group; unless `collectives.communicators=many`, all groups of the same ranks are.

Sizes per channel and connection: NCCL's default buffers for its three protocols have 4 MiB
(NCCL_BUFFSIZE), 4.7 MiB and 0.5 MiB, in one allocation of 10 MiB; each end of the connection has
another 2 MiB of flags. An 8 x H100 node agrees: its first all-to-all took 3.28 GB (NCCL issue
#1685), and 7 ranks x 32 channels x 14 MiB are 3.29 GB. On 4 x A100 a group of more than two ranks
took 144 MB more than a group of two (NCCL issue #964): one more neighbour, hence about 10 channels.
Buffers for NVLink SHARP are not counted.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.geometry.inventory import shared_parameters
from frontier_llm.geometry.partition import Hop
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import updates_whole_matrices
from frontier_llm.units import MIB

CONNECTION_BYTES = 14 * MIB
"""Buffers of one connection to one rank in one channel; see the docstring of this module."""
NETWORK_BYTES = 128 * MIB
"""Buffers that all sends to, and receives from, ranks of other nodes share in a communicator: 32
channels x 16 steps x 128 KiB in each direction. An estimate from NCCL's defaults."""


ALL_RANKS, TENSOR, CONTEXT, STAGES = "all ranks", "tensor", "context", "stages"
"""Names of the groups of all ranks, of tensor ranks, of context ranks, and of pipeline stages."""


class Communicator(NamedTuple):
    """A communicator of one rank."""

    name: str
    ring: int
    """Ranks whose collectives run in rings or trees; 1 = there are no such collectives."""
    near: int = 0
    """Ranks of the same node with which the rank exchanges messages directly."""
    far: int = 0
    """Ranks of other nodes with which the rank exchanges messages directly."""
    exchanges: bool = False
    """Whether these are all other ranks of the group, by all-to-alls."""

    def buffer_bytes(self, channels: int) -> int:
        """Return the device memory of the buffers with so many channels of collectives.

        Direct messages use the next power of two.
        """
        in_rings = channels * min(2, self.ring - 1)
        direct = self.near * (1 << (channels - 1).bit_length()) if channels else 0
        network = NETWORK_BYTES if self.far and channels else 0
        return (in_rings + direct) * CONNECTION_BYTES + network


TiedStages = frozenset[tuple[int, ...]]
"""Sets of at least two stages, ascending, that hold copies of a parameter."""


def tied_stages(layout: ResolvedLayout) -> TiedStages:
    """Return the sets of stages whose ranks add up the gradients of a parameter's copies."""
    shared = shared_parameters(layout.model, layout.model_chunks).values()
    sets = {tuple(sorted({chunk.stage for chunk in chunks})) for chunks in shared}
    return frozenset(stages for stages in sets if len(stages) > 1)


def communicators(layout: ResolvedLayout, stage: int, tied: TiedStages) -> tuple[Communicator, ...]:
    """Return the communicators that the first rank of a stage creates in a run; gloo has none."""
    is_gloo = layout.collectives.backend == "gloo"
    return () if is_gloo else used_groups(layout, stage, tied)


def used_groups(layout: ResolvedLayout, stage: int, tied: TiedStages) -> tuple[Communicator, ...]:
    """Return what the first rank of a stage uses in a run, each group with several ranks."""
    grid = layout.grid
    ranks = [grid.rank(Coordinates(0, 0, other)) for other in neighbours(layout, stage)]
    first = grid.rank(Coordinates(0, 0, stage))
    near = sum(grid.same_node(first, rank) for rank in ranks)
    sums = any(stage in set_ and len(set_) == grid.pipeline for set_ in tied)
    groups = [
        Communicator(ALL_RANKS, grid.size),
        Communicator(TENSOR, grid.tensor),
        Communicator(STAGES, grid.pipeline if sums else 1, near, len(ranks) - near),
        *(
            Communicator(tied_name(set_), len(set_))
            for set_ in sorted(tied)
            if stage in set_ and len(set_) < grid.pipeline
        ),
        *(_hop(layout, stage, hop) for hop in layout.factors.collective_hops),
    ]
    if grid.context > 1:  # ranks send each other keys and values
        near, far = _hop_places(grid, Hop("params", 1, grid.context), first % grid.ranks_per_node)
        groups.append(Communicator(CONTEXT, 1, near, far, exchanges=True))
    if layout.communicators != "many":
        groups = _merged(groups, grid)
    return tuple(group for group in groups if group.ring > 1 or group.near + group.far)


def hop_name(hop: Hop) -> str:
    """Return the name of the group of a hop."""
    return f"{hop.digit} of states, {hop.width} data ranks, {hop.low} apart"


def tied_name(stages: tuple[int, ...]) -> str:
    """Return the name of the group in which stages add up the gradients of a parameter's copies."""
    return f"copies of parameters on stages {', '.join(map(str, stages))}"


def neighbours(layout: ResolvedLayout, stage: int) -> tuple[int, ...]:
    """Return the stages with which a stage exchanges messages, ascending."""
    placement = layout.placement
    own = [placement.chunk(stage, index) for index in range(placement.virtual_stages)]
    next_to = {chunk + step for chunk in own for step in (-1, 1)} - {-1, placement.chunks}
    return tuple(sorted({placement.stage(chunk) for chunk in next_to} - {stage}))


def _merged(groups: Iterable[Communicator], grid: Grid) -> list[Communicator]:
    merged: dict[str, Communicator] = {}
    for group in groups:
        size = (
            grid.pipeline if group.name == STAGES else max(group.ring, 1 + group.near + group.far)
        )
        name = ALL_RANKS if size == grid.size else group.name
        old = merged.get(name, Communicator(name, 1))
        merged[name] = Communicator(
            name,
            max(old.ring, group.ring),
            max(old.near, group.near),
            max(old.far, group.far),
            old.exchanges or group.exchanges,
        )
    return list(merged.values())


def _hop(layout: ResolvedLayout, stage: int, hop: Hop) -> Communicator:
    """Return the communicator of one hop of a data rank.

    fp32 gradients are reduced in rings. In other formats each rank sends every other rank its part,
    and so it does where ranks hold whole matrices, hence parts of different lengths.
    """
    grid, formats = layout.grid, layout.formats
    first = grid.rank(Coordinates(0, 0, stage))
    near, far = _hop_places(grid, hop, first % grid.ranks_per_node)
    of_hop = formats.sums if hop.digit == "replica" else formats.grads
    of_level = of_hop[1:] if far == 0 else of_hop[2:]
    reduces = hop.digit != "params" or layout.factors.grads > 1
    name = hop_name(hop)
    exchanges = updates_whole_matrices(layout.optimizer) and hop.digit != "replica"
    if not exchanges and (
        not reduces or all(message_format.name == "fp32" for message_format in of_level)
    ):
        return Communicator(name, hop.width)
    return Communicator(name, hop.width, near, far, exchanges=True)


@lru_cache(maxsize=1 << 14)
def _hop_places(grid: Grid, hop: Hop, place: int) -> tuple[int, int]:
    """Count the other ranks of a hop's group on the first rank's node, and on other nodes.

    Cached, because a search asks for the stages of many layouts, whose groups are equal. `place`
    is the position of the first rank on its node.
    """
    offsets = [grid.rank(Coordinates(0, data_rank, 0)) for data_rank in hop.group(0)]
    near = sum(place + offset < grid.ranks_per_node for offset in offsets[1:])
    return near, len(offsets) - 1 - near
