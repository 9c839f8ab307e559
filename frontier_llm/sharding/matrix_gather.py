"""Gathers the parts of matrices that tensor parallelism divides."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from frontier_llm.collectives.primitives import all_gather
from frontier_llm.collectives.traffic import Traffic


class MatrixGather:
    """Gathers matrices over the tensor ranks of this rank, which update the same elements."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, *, pairwise: bool) -> None:
        """Gather over a group.

        Args:
            group: the ranks that split the same matrices.
            traffic: counts the bytes, under the name `whole_matrices`.
            pairwise: whether to send point-to-point messages; only on a CPU.
        """
        self._group, self._traffic, self._pairwise = group, traffic, pairwise

    def start(self, part: torch.Tensor, dim: int | None) -> Callable[[], torch.Tensor]:
        """Begin to gather a matrix; collective over the group.

        Args:
            part: [rows, columns], this rank's part; it must not be touched until the result is
                taken.
            dim: dim along which the ranks hold parts; None = this rank holds the whole matrix.

        Returns:
            A function that waits, and returns the whole matrix.
        """
        ranks = self._group.size()
        if dim is None or ranks == 1:
            return lambda: part
        buffer = part.new_empty(ranks, part.numel())
        buffer[self._group.rank()] = part.flatten()
        work = all_gather(
            buffer.view(-1), self._group, self._traffic, "whole_matrices", pairwise=self._pairwise
        )

        def result() -> torch.Tensor:
            work.wait()
            return torch.cat([row.view(part.shape) for row in buffer], dim=dim)

        return result

    def own_part(self, matrix: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Return this rank's part of a whole matrix; the arguments are those of `start`."""
        if dim is None:
            return matrix
        return matrix.chunk(self._group.size(), dim)[self._group.rank()]
