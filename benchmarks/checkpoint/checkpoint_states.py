"""Weights and moments of one rank with known values, to be saved, restored and compared."""

from collections.abc import Iterator

import torch

from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, STATES
from frontier_llm.protocols import ParameterRecord, Placement, StateShard

COLUMNS = 1024
ROWS = 1024
"""Rows of one tensor on one rank; all integers up to its size are exact in fp32."""


class KnownStates:
    """States of a given size, sharded as in ZeRO-1: each rank holds rows of all tensors.

    An element's value after step k is a function of its position and k, so restored states can be
    checked without a copy.
    """

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        """Allocate the states and set them to their values at step 0.

        Args:
            rank: rank of this process.
            ranks: number of ranks.
            size: bytes of this rank's weights and moments together.
        """
        rows = max(1, size // (len(STATES) * ELEMENT_BYTES * COLUMNS))
        full, rest = divmod(rows, ROWS)
        heights = [ROWS] * full + ([rest] if rest else [])
        self.shards = [_shard(index, rank, ranks, height) for index, height in enumerate(heights)]
        self.tensors = {
            f"{shard.record.name}.{state}.{rank}": getattr(shard, state)
            for shard in self.shards
            for state in STATES
        }
        for tensor, base in self._bases():
            tensor.copy_(base)

    @property
    def size(self) -> int:
        """Size of this rank's states in bytes."""
        return sum(tensor.numel() for tensor in self.tensors.values()) * ELEMENT_BYTES

    def update(self) -> None:
        """Change every element, as an optimizer's update does."""
        for tensor in self.tensors.values():
            tensor.add_(1.0)

    def clear(self) -> None:
        """Overwrite all values."""
        for tensor in self.tensors.values():
            tensor.fill_(-1.0)

    def holds(self, step: int) -> bool:
        """Return whether every element has its value after that many steps."""
        return all(torch.equal(tensor, base + step) for tensor, base in self._bases())

    def _bases(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index, tensor in enumerate(self.tensors.values()):
            yield tensor, torch.arange(tensor.numel(), dtype=torch.float32) + 1000.0 * index


def _shard(index: int, rank: int, ranks: int, rows: int) -> StateShard:
    shape, origin = (ranks * rows, COLUMNS), (0, 0)
    record = ParameterRecord(
        parameter=torch.nn.Parameter(torch.empty(shape, device="meta")),
        unit=f"layers.{index}",
        placements=(Placement(f"layers.{index}.weight", shape, origin, origin, shape),),
        decayed=True,
        counted=True,
        tensor_partial=False,
        tied=False,
    )
    count = rows * COLUMNS
    return StateShard(record, rank * count, *(torch.empty(count) for _ in STATES))
