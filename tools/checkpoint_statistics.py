"""Mean, deviation and extremes of what a checkpoint holds; each file is read once, in order."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, STATES
from frontier_llm.checkpoint.reader import ReadAhead, chunk_ranges
from frontier_llm.checkpoint.scan import Checkpoint
from frontier_llm.errors import CheckpointError


@dataclass
class Spread:
    """How values spread that come part by part and are not kept.

    Values that are not finite are counted, and left out of all else. Computed in fp64.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing
    sample variances (1979), equation 2.1.
    """

    elements: int = 0
    """All that came."""
    finite: int = 0
    """Those that are finite."""
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, values: torch.Tensor) -> None:
        """Take in a part: [n] fp32, read only."""
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
        """Standard deviation of the finite values; 0 for none."""
        return math.sqrt(self.squares / self.finite) if self.finite else 0.0

    @property
    def not_finite(self) -> int:
        """How many are infinite or not a number."""
        return self.elements - self.finite


@dataclass(frozen=True)
class _Run:
    """Elements of a state of a tensor that follow each other in a file."""

    at: int
    """First byte."""
    end: int
    """Behind the last one."""
    name: str
    state: str


def spreads(
    checkpoint: Checkpoint, group: Callable[[str], str], advance: Callable[[int], None]
) -> dict[tuple[str, str], Spread]:
    """Read a whole checkpoint, its digests compared, and return how its values spread.

    Memory: two chunks of a file, and twice a chunk for its values in fp64.

    Args:
        checkpoint: of any layout.
        group: what a tensor of that name counts in; the name itself keeps tensors apart.
        advance: called with the number of bytes that were read.

    Returns:
        By (group, state), in the order of the manifest.

    Raises:
        CheckpointError: it is damaged.
    """
    manifest = checkpoint.manifest
    found = {(group(name), state): Spread() for name in manifest.tensors for state in STATES}
    runs = _runs(checkpoint)
    ranges = [chunk for name in manifest.files for chunk in chunk_ranges(checkpoint, name)]
    with ReadAhead(checkpoint, ranges, verify=True) as reader:
        for range_, content in reader:
            if isinstance(content, CheckpointError):
                raise content
            for run in runs[range_.file]:
                start, stop = max(run.at, range_.start), min(run.end, range_.stop)
                if start < stop:
                    values = content[start - range_.start : stop - range_.start]
                    found[group(run.name), run.state].add(values.view(torch.float32))
            advance(range_.stop - range_.start)
    return found


def _runs(checkpoint: Checkpoint) -> dict[str, list[_Run]]:
    """Return what each file holds."""
    runs: dict[str, list[_Run]] = {name: [] for name in checkpoint.manifest.files}
    for name, tensor in checkpoint.manifest.tensors.items():
        for piece in tensor.pieces:
            for state, at in piece.bytes_at.items():
                end = at + piece.count * ELEMENT_BYTES
                runs[piece.file].append(_Run(at, end, name, state))
    return runs
