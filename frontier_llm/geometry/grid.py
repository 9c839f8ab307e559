"""The grid of ranks: three axes (tensor, data and pipeline), and the groups along each axis.

Ranks are connected by links of three levels: inside a package of devices, such as the two GCDs of
an MI250X, inside a node, and through the network. Consecutive ranks differ first in the tensor
coordinate, then in the data coordinate, then in the pipeline coordinate, so that the axes that
communicate most use the fastest links. This order is megatron-core's default "tp-cp-ep-dp-pp".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Level = Literal["package", "node", "network"]
"""The level of the links between two ranks. Ranks of different packages of a node are connected at
the level `node`, ranks of different nodes at the level `network`."""
LEVELS: tuple[Level, ...] = get_args(Level)


class Coordinates(NamedTuple):
    """Position of a rank on each axis."""

    tensor: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class Grid:
    """All ranks of a run, arranged as pipeline x data x tensor."""

    tensor: int
    data: int
    pipeline: int
    ranks_per_node: int
    ranks_per_package: int = 1
    """Number of neighbouring ranks that share a package; it divides `ranks_per_node`."""
    context: int = 1
    """Number of neighbouring data ranks that divide the tokens of a sample; it divides `data`."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.data * self.pipeline

    @property
    def replicas(self) -> int:
        """Number of sets of ranks that read different samples."""
        return self.data // self.context

    @property
    def nodes(self) -> int:
        """Number of nodes, of which the last one may have fewer ranks."""
        return -(-self.size // self.ranks_per_node)

    def replica(self, rank: int) -> int:
        """Return the number of the replica whose samples a rank reads."""
        return self.coordinates(rank).data // self.context

    def context_rank(self, rank: int) -> int:
        """Return the place of a rank among those that divide the tokens of its samples."""
        return self.coordinates(rank).data % self.context

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, data, pipeline)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at these coordinates."""
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks over which the matrices of this rank's stage and replica are divided."""
        at = self.coordinates(rank)
        return tuple(self.rank(at._replace(tensor=t)) for t in range(self.tensor))

    def data_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same part of the model, each for other samples or tokens."""
        at = self.coordinates(rank)
        return tuple(self.rank(at._replace(data=d)) for d in range(self.data))

    def context_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute the same samples on other tokens."""
        at = self.coordinates(rank)
        first = at.data - at.data % self.context
        return tuple(self.rank(at._replace(data=first + r)) for r in range(self.context))

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute the same samples on different stages."""
        at = self.coordinates(rank)
        return tuple(self.rank(at._replace(pipeline=p)) for p in range(self.pipeline))

    def node(self, rank: int) -> int:
        """Return the number of the node on which a rank runs."""
        return rank // self.ranks_per_node

    def level(self, rank: int, other: int) -> Level:
        """Return the level of the links between two ranks."""
        if not self.same_node(rank, other):
            return "network"
        same_package = rank // self.ranks_per_package == other // self.ranks_per_package
        return "package" if same_package else "node"

    def farthest_level(self, ranks: Sequence[int]) -> Level:
        """Return the farthest level of the links between the ranks of a group."""
        return max((self.level(ranks[0], rank) for rank in ranks), key=LEVELS.index)

    def same_node(self, rank: int, other: int) -> bool:
        """Whether two ranks run on the same node."""
        return self.node(rank) == self.node(other)


def data_ranks_per_node(grid: Grid) -> int | None:
    """Return the number of data ranks with equal tensor and pipeline coordinate on one node.

    None if this number differs between nodes or between coordinates, so that "the data ranks of a
    node" has no meaning.
    """
    return _data_ranks_within(grid, grid.ranks_per_node)


def data_ranks_per_package(grid: Grid) -> int | None:
    """Return the number of data ranks in a package of devices, as `data_ranks_per_node` does.

    If the cluster has no packages, each rank is a package of its own.
    """
    return _data_ranks_within(grid, grid.ranks_per_package)


def level_borders(grid: Grid) -> tuple[int, ...]:
    """Return the numbers of data ranks in a package and in a node, ascending, without useless ones.

    A number is useless if it is 1 or all data ranks, or if packages or nodes differ in it.
    """
    numbers = {data_ranks_per_package(grid), data_ranks_per_node(grid)}
    return tuple(sorted(number for number in numbers if number and 1 < number < grid.data))


def _data_ranks_within(grid: Grid, size: int) -> int | None:
    """Return how many data ranks of a group lie in each run of `size` neighbouring ranks.

    The ranks of a data group are `grid.tensor` apart, and groups of one stage fill a run of
    tensor x data ranks.
    """
    run = grid.tensor * grid.data
    if grid.tensor >= size:
        return 1
    if size % run == 0 or grid.size <= size:
        return grid.data
    return size // grid.tensor if size % grid.tensor == 0 and run % size == 0 else None
