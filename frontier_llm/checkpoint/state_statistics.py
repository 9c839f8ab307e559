"""Compute mean, deviation and extremes of the states in a checkpoint, reading each file once."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, STATES
from frontier_llm.checkpoint.read_ahead import ReadAhead, chunk_ranges
from frontier_llm.errors import CheckpointError


@dataclass
class Spread:
    """Running mean, deviation and extremes of values that are added in parts.

    Values that are not finite are counted and otherwise ignored. Computed in fp64.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing
    sample variances (1979), equation 2.1.
    """

    elements: int = 0
    """Number of values added."""
    finite: int = 0
    """Number of finite values added."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, values: torch.Tensor) -> None:
        """Add values, [n] fp32, which are not changed."""
        self.elements += values.numel()
        part = values[torch.isfinite(values)].double()
        if not part.numel():
            return
        mean = float(part.mean())
        apart, before = mean - self.mean, self.finite
        self.finite += part.numel()
        self.mean += apart * part.numel() / self.finite
        self.squares += float((part - mean).square().sum())
        self.squares += apart**2 * before * part.numel() / self.finite
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
    """Bytes [at, end) of a file, which store elements of one state of one tensor."""

    at: int
    end: int
    name: str
    """Global name of the tensor."""
    state: str


def spreads(
    checkpoint: Checkpoint, group: Callable[[str], str], advance: Callable[[int], None]
) -> dict[tuple[str, str], Spread]:
    """Read a whole checkpoint, verify its digests, and return the spread of its values.

    Memory: two chunks of a file, and twice a chunk for its values in fp64.

    Args:
        checkpoint: a checkpoint of any layout.
        group: maps a tensor's name to the name of the group in which it is counted.
        advance: called with the number of bytes that were read.

    Returns:
        Spreads by (group, state), in the order of the manifest.

    Raises:
        CheckpointError: a file is damaged.
    """
    manifest = checkpoint.manifest
    found = {(group(name), state): Spread() for name in manifest.tensors for state in STATES}
    content_of = _state_bytes(checkpoint)
    ranges = [chunk for name in manifest.files for chunk in chunk_ranges(checkpoint, name)]
    with ReadAhead(checkpoint, ranges, verify=True) as reader:
        for range_, content in reader:
            if isinstance(content, CheckpointError):
                raise content
            for each in content_of[range_.file]:
                start, stop = max(each.at, range_.start), min(each.end, range_.stop)
                if start < stop:
                    values = content[start - range_.start : stop - range_.start]
                    found[group(each.name), each.state].add(values.view(torch.float32))
            advance(range_.stop - range_.start)
    return found


def _state_bytes(checkpoint: Checkpoint) -> dict[str, list[_StateBytes]]:
    """Return which bytes of each file store elements, by the file's name."""
    found: dict[str, list[_StateBytes]] = {name: [] for name in checkpoint.manifest.files}
    for name, tensor in checkpoint.manifest.tensors.items():
        for stored in tensor.stored_ranges:
            for state, at in stored.bytes_at.items():
                end = at + stored.count * ELEMENT_BYTES
                found[stored.file].append(_StateBytes(at, end, name, state))
    return found
