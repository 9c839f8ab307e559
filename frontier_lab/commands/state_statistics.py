"""Compute mean, deviation and extremes of the states in a checkpoint (`inspect --statistics`).

Each file is read once, chunk by chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import ELEMENT_BYTES
from frontier_llm.checkpoint.range_reader import ReadAhead, chunk_ranges
from frontier_llm.errors import CheckpointError


@dataclass
class Spread:
    """Mean, deviation and extremes of values that are added in parts, computed in fp64.

    Infinite values and NaN are counted and otherwise ignored.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing
    sample variances (1979), equation 2.1.
    """

    elements: int = 0
    finite: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared differences between the values and their mean."""
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, values: torch.Tensor) -> None:
        """Add values, [n] fp32."""
        self.elements += values.numel()
        part = values[torch.isfinite(values)].double()
        if not part.numel():
            return
        part_mean = float(part.mean())
        difference, previous = part_mean - self.mean, self.finite
        self.finite += part.numel()
        self.mean += difference * part.numel() / self.finite
        self.squares += float((part - part_mean).square().sum())
        self.squares += difference**2 * previous * part.numel() / self.finite
        self.smallest = min(self.smallest, float(part.min()))
        self.largest = max(self.largest, float(part.max()))

    @property
    def deviation(self) -> float:
        """Standard deviation of the finite values; 0 if there are none."""
        return math.sqrt(self.squares / self.finite) if self.finite else 0.0

    @property
    def not_finite(self) -> int:
        """Number of values that are infinite or not a number."""
        return self.elements - self.finite


@dataclass(frozen=True)
class _StateBytes:
    start: int
    stop: int
    name: str
    state: str


def spreads(
    checkpoint: Checkpoint, group: Callable[[str], str], advance: Callable[[int], None]
) -> dict[tuple[str, str], Spread]:
    """Read a whole checkpoint, verify its digests, and return spreads by (group, state).

    This needs memory for two chunks of a file, and twice the size of a chunk for values in fp64.
    `group` maps the name of a tensor to that of its group; `advance` gets the size of each chunk.
    Reduced moments are refused.
    """
    manifest = checkpoint.manifest
    if manifest.moments is not None:
        raise CheckpointError(
            f"{checkpoint.folder} has moments in {manifest.moments} (checkpoint.moments), of which "
            "there are no statistics; use a checkpoint of the run directory"
        )
    found = {
        (group(name), state): Spread()
        for name, tensor in manifest.tensors.items()
        for state in tensor.states
    }
    content_of = _state_bytes(checkpoint)
    ranges = [chunk for name in manifest.files for chunk in chunk_ranges(checkpoint, name)]
    with ReadAhead(checkpoint, ranges, verify=True) as reader:
        for range_, content in reader:
            if isinstance(content, CheckpointError):
                raise content
            for stored in content_of[range_.file]:
                start, stop = max(stored.start, range_.start), min(stored.stop, range_.stop)
                if start < stop:
                    values = content[start - range_.start : stop - range_.start]
                    found[group(stored.name), stored.state].add(values.view(torch.float32))
            advance(range_.stop - range_.start)
    return found


def _state_bytes(checkpoint: Checkpoint) -> dict[str, list[_StateBytes]]:
    found: dict[str, list[_StateBytes]] = {name: [] for name in checkpoint.manifest.files}
    for name, tensor in checkpoint.manifest.tensors.items():
        for stored in tensor.stored_ranges:
            for state, start in stored.bytes_at.items():
                stop = start + stored.count * ELEMENT_BYTES
                found[stored.file].append(_StateBytes(start, stop, name, state))
    return found
