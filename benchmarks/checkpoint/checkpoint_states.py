"""States with known values for bench_checkpoint: the weights and both moments of one rank."""

from collections.abc import Iterator
from typing import Protocol

import torch

from frontier_llm.checkpoint.manifest import ELEMENT_BYTES
from frontier_llm.protocols import ParameterRecord, Placement, StateShard

STATES = ("master", "exp_avg", "exp_avg_sq")
"""States of AdamW."""
COLUMNS = 1024
ROWS = 1024
"""Size of a tensor on one rank. The values are integers small enough to be exact in fp32."""


class SavedStates(Protocol):
    """States of one rank that a saver saves.

    Attributes:
        shards: the shards of the rank.
    """

    shards: list[StateShard]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The same as tensors, by a name that no other rank uses."""

    @property
    def size(self) -> int:
        """Size of all tensors in bytes."""


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
        all_rows = max(1, size // (len(STATES) * ELEMENT_BYTES * COLUMNS))
        full_tensors, rest = divmod(all_rows, ROWS)
        rows_of_tensors = [ROWS] * full_tensors + ([rest] if rest else [])
        self.shards = [
            _shard(index, rank, ranks, rows) for index, rows in enumerate(rows_of_tensors)
        ]
        self.tensors = {
            f"{shard.record.name}.{state}.{rank}": shard.tensors[state]
            for shard in self.shards
            for state in STATES
        }
        for tensor, first_values in self._tensors_with_first_values():
            tensor.copy_(first_values)

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
        """Return whether every element has the value that it has after `step` updates."""
        return all(
            torch.equal(tensor, first_values + step)
            for tensor, first_values in self._tensors_with_first_values()
        )

    def _tensors_with_first_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor with its values at step 0."""
        for index, tensor in enumerate(self.tensors.values()):
            yield tensor, torch.arange(tensor.numel(), dtype=torch.float32) + 1000.0 * index


def _shard(index: int, rank: int, ranks: int, rows: int) -> StateShard:
    """Return this rank's rows of a tensor, of which every rank has the same number of rows."""
    shape, origin = (ranks * rows, COLUMNS), (0, 0)
    record = ParameterRecord(
        parameter=torch.nn.Parameter(torch.empty(shape, device="meta")),
        unit=f"layers.{index}",
        placements=(Placement(f"layers.{index}.weight", shape, origin, origin, shape),),
        group="matrices",
        counted=True,
        tensor_partial=False,
        tied=False,
    )
    count = rows * COLUMNS
    return StateShard(record, rank * count, {state: torch.empty(count) for state in STATES})
