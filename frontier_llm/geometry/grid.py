"""The grid of ranks: three axes (tensor, data and pipeline), and the groups along each axis.

Consecutive ranks differ first in the tensor coordinate, then in the data coordinate, then in the
pipeline coordinate. The axes that communicate most thus use the fastest links. This order is
megatron-core's default "tp-cp-ep-dp-pp".
"""

from dataclasses import dataclass
from typing import NamedTuple


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

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.data * self.pipeline

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
        """Return the ranks that compute the same part of the model on different samples."""
        at = self.coordinates(rank)
        return tuple(self.rank(at._replace(data=d)) for d in range(self.data))

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute the same samples on different stages."""
        at = self.coordinates(rank)
        return tuple(self.rank(at._replace(pipeline=p)) for p in range(self.pipeline))

    def node(self, rank: int) -> int:
        """Return the number of the node on which a rank runs."""
        return rank // self.ranks_per_node

    def same_node(self, rank: int, other: int) -> bool:
        """Whether two ranks run on the same node."""
        return self.node(rank) == self.node(other)
