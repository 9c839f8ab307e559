"""Weights and moments of one rank whose every element is known, to be saved and compared."""

from collections.abc import Iterator

import torch

from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, STATES
from frontier_llm.protocols import ParameterRecord, Placement, StateShard

COLUMNS = 1024
ROWS = 1024
"""Of one tensor on one rank; whole numbers up to its elements are exact in fp32."""


class KnownStates:
    """As many states as asked for, cut over ranks as ZeRO-1 does: each holds rows of all tensors.

    An element's value after step k is a function of its place, and k: so what a checkpoint gives
    back can be compared without having been kept.
    """

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        """Allocate.

        Args:
            rank: of this process.
            ranks: number of them.
            size: bytes of this rank's states, all three together.
        """
        rows = max(1, size // (len(STATES) * ELEMENT_BYTES * COLUMNS))
        whole, rest = divmod(rows, ROWS)
        heights = [ROWS] * whole + ([rest] if rest else [])
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
        """Bytes of this rank's states."""
        return sum(tensor.numel() for tensor in self.tensors.values()) * ELEMENT_BYTES

    def update(self) -> None:
        """Make a step: every element changes, as in an optimizer's update."""
        for tensor in self.tensors.values():
            tensor.add_(1.0)

    def clear(self) -> None:
        """Forget all values."""
        for tensor in self.tensors.values():
            tensor.fill_(-1.0)

    def holds(self, step: int) -> bool:
        """Whether every element has its value after that many steps."""
        return all(torch.equal(tensor, base + step) for tensor, base in self._bases())

    def _bases(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index, tensor in enumerate(self.tensors.values()):
            yield tensor, torch.arange(tensor.numel(), dtype=torch.float32) + 1000.0 * index


def _shard(index: int, rank: int, ranks: int, rows: int) -> StateShard:
    shape, nowhere = (ranks * rows, COLUMNS), (0, 0)
    record = ParameterRecord(
        parameter=torch.nn.Parameter(torch.empty(shape, device="meta")),
        unit=f"layers.{index}",
        placements=(Placement(f"layers.{index}.weight", shape, nowhere, nowhere, shape),),
        decayed=True,
        counted=True,
        tensor_partial=False,
        tied=False,
    )
    count = rows * COLUMNS
    return StateShard(record, rank * count, *(torch.empty(count) for _ in STATES))
