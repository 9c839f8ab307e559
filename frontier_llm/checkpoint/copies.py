"""Which stored elements go where: boxes that stored and wanted runs have in common.

Stored runs and wanted runs are cut into boxes of global tensors; what two boxes have in common is
one copy. A copy is cut where chunks of its file end, so that each chunk can be used by itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, Piece, Tensor
from frontier_llm.checkpoint.pieces import Part, Shape, blocks, covered
from frontier_llm.checkpoint.scan import Checkpoint
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import ParameterRecord

Slices = tuple[slice, ...]
Runs = Mapping[str, torch.Tensor]
"""Of each state, elements that follow each other."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor whose elements follow each other in a run."""

    start: Shape
    """In the tensor."""
    shape: Shape
    offset: int
    """First element in the run."""

    def view(self, run: torch.Tensor) -> torch.Tensor:
        """Return the box's elements of a run, in its shape."""
        return run[self.offset : self.offset + prod(self.shape)].view(self.shape)


@dataclass(frozen=True, eq=False)
class Copy:
    """A box of elements to be copied from a file into a state."""

    file: str
    at: int
    """Byte of the file where the stored box begins."""
    stored_shape: Shape
    """Of that box."""
    source: Slices
    """What to take of it."""
    target: torch.Tensor
    """Where it goes: a view of the state, in the shape of the slices."""

    @property
    def end(self) -> int:
        """Byte of the file where the stored box ends."""
        return self.at + prod(self.stored_shape) * ELEMENT_BYTES

    def cut(self, chunk_bytes: int) -> Iterator["Copy"]:
        """Yield the same as copies that each need one chunk of the file."""
        if self.at // chunk_bytes == (self.end - 1) // chunk_bytes:
            yield self
            return
        wanted = Box(*_start_and_shape(self.source), offset=0)
        position = self.at
        while position < self.end:
            stop = min((position // chunk_bytes + 1) * chunk_bytes, self.end)
            first, count = (position - self.at) // ELEMENT_BYTES, (stop - position) // ELEMENT_BYTES
            for start, shape in blocks(self.stored_shape, first, count):
                common = _common(Box(start, shape, 0), wanted)
                if common is not None:
                    source, target = common
                    yield Copy(self.file, position, shape, source, self.target[target])
                position += prod(shape) * ELEMENT_BYTES

    def run(self, content: torch.Tensor, begin: int) -> None:
        """Copy.

        Args:
            content: [bytes] uint8 of the file, read only.
            begin: their first byte in it, a multiple of an element.
        """
        stored = content[self.at - begin : self.end - begin].view(torch.float32)
        self.target.copy_(stored.view(self.stored_shape)[self.source])


def copies(
    checkpoint: Checkpoint, record: ParameterRecord, start: int, runs: Runs
) -> Iterator[Copy]:
    """Yield what fills runs of a parameter's states, having seen that it fills every element once.

    Args:
        checkpoint: of any layout.
        record: of the parameter.
        start: first element of the runs in the flattened parameter.
        runs: by state, equally long.

    Raises:
        CheckpointError: a tensor is absent or of another shape, or an element is not stored
            exactly once; names it.
    """
    count = len(next(iter(runs.values())))
    for part in covered(record.placements, record.parameter.shape, start, count):
        inside = slice(part.offset, part.offset + part.count)
        yield from _part_copies(checkpoint, {s: run[inside] for s, run in runs.items()}, part)


def stored_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return what a checkpoint says of a tensor.

    Raises:
        CheckpointError: it has none of that name.
    """
    tensor = checkpoint.manifest.tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.folder}: {name} is absent; is it a checkpoint of another model?"
        )
    return tensor


def _part_copies(checkpoint: Checkpoint, runs: Runs, part: Part) -> Iterator[Copy]:
    box = part.placement
    stored = stored_tensor(checkpoint, box.name)
    if stored.shape != box.global_shape:
        raise CheckpointError(
            f"{checkpoint.folder}: {box.name} is of shape {list(stored.shape)}, the model wants "
            f"{list(box.global_shape)}; is it another model?"
        )
    pieces = [(piece, list(_boxes(piece.start, piece))) for piece in stored.pieces]
    for wanted in _boxes(box.global_start, part):
        found = [
            _Part(piece, stored_box, *common)
            for piece, boxes in pieces
            for stored_box in boxes
            if (common := _common(stored_box, wanted)) is not None
        ]
        for each in _once(checkpoint, box.name, wanted.shape, found):
            yield from each.copies(wanted, runs)


def _boxes(box_start: Shape, run: Piece | Part) -> Iterator[Box]:
    """Yield a run of a box as boxes of the global tensor."""
    box_shape = run.shape if isinstance(run, Piece) else run.placement.shape
    offset = 0
    for start, shape in blocks(box_shape, run.first, run.count):
        place = tuple(a + b for a, b in zip(box_start, start, strict=True))
        yield Box(place, shape, offset)
        offset += prod(shape)


@dataclass(frozen=True)
class _Part:
    """What a stored box has of a wanted one."""

    piece: Piece
    stored: Box
    source: Slices
    """Of the stored box."""
    target: Slices
    """Of the wanted one."""

    @property
    def elements(self) -> int:
        """How many they are."""
        return prod(_start_and_shape(self.target)[1])

    def copies(self, wanted: Box, runs: Runs) -> Iterator[Copy]:
        """Yield one for each state."""
        for state, run in runs.items():
            at = self.piece.bytes_at[state] + self.stored.offset * ELEMENT_BYTES
            target = wanted.view(run)[self.target]
            yield Copy(self.piece.file, at, self.stored.shape, self.source, target)


def _once(checkpoint: Checkpoint, name: str, shape: Shape, parts: list[_Part]) -> list[_Part]:
    """Return those of the parts of a box that together give every element of it."""
    repeats = checkpoint.manifest.repeats
    for part in parts if repeats or len(parts) == 1 else ():
        if part.elements == prod(shape):  # the usual case, and the mask below takes time
            return [part]
    filled, chosen = np.zeros(shape, dtype=np.bool_), []
    for part in parts:
        known = filled[part.target]
        if known.any() and not repeats:
            raise CheckpointError(
                f"{checkpoint.folder}: elements of {name} are stored more than once"
            )
        if not known.all():
            chosen.append(part)
            filled[part.target] = True
    if not filled.all():
        raise CheckpointError(
            f"{checkpoint.folder}: {np.count_nonzero(~filled)} of {filled.size} elements of "
            f"{name} are not stored"
        )
    return chosen


def _common(stored: Box, wanted: Box) -> tuple[Slices, Slices] | None:
    """Return what two boxes have in common, as slices of each; None if nothing."""
    source, target = [], []
    for first, size, start, length in zip(
        stored.start, stored.shape, wanted.start, wanted.shape, strict=True
    ):
        low, high = max(first, start), min(first + size, start + length)
        if low >= high:
            return None
        source.append(slice(low - first, high - first))
        target.append(slice(low - start, high - start))
    return tuple(source), tuple(target)


def _start_and_shape(slices: Slices) -> tuple[Shape, Shape]:
    return tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices)
