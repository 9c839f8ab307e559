"""Plan which stored elements are copied into which elements of a state.

Stored ranges and wanted ranges are split into boxes of global tensors. The intersection of two
boxes is one copy. A copy is split where chunks of its file end, so that each chunk can be used by
itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, StoredRange, Tensor
from frontier_llm.checkpoint.stored_ranges import (
    PlacedRange,
    Shape,
    placed_ranges,
    split_into_boxes,
)
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import ParameterRecord

Slices = tuple[slice, ...]
Targets = Mapping[str, torch.Tensor]
"""Contiguous elements to fill, [elements], by the name of the state, as "master"."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor whose elements are contiguous in a range."""

    start: Shape
    """Index of the first element in the tensor."""
    shape: Shape
    offset: int
    """Index of the first element in the range."""

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """Return the box's elements of a range's values, in the shape of the box."""
        return values[self.offset : self.offset + prod(self.shape)].view(self.shape)


@dataclass(frozen=True, eq=False)
class FileCopy:
    """A copy of a box of elements from a file into a state."""

    file: str
    """Name of the file."""
    at: int
    """Offset of the stored box in the file in bytes."""
    stored_shape: Shape
    """Shape of the stored box."""
    source: Slices
    """Slices of the stored box to copy."""
    target: torch.Tensor
    """View of the state to overwrite, in the shape of the slices."""

    @property
    def end(self) -> int:
        """Offset of the end of the stored box in the file in bytes."""
        return self.at + prod(self.stored_shape) * ELEMENT_BYTES

    def split(self, chunk_bytes: int) -> Iterator["FileCopy"]:
        """Split the copy into copies that each read one chunk of the file."""
        if self.at // chunk_bytes == (self.end - 1) // chunk_bytes:
            yield self
            return
        wanted = Box(*_start_and_shape(self.source), offset=0)
        position = self.at
        while position < self.end:
            stop = min((position // chunk_bytes + 1) * chunk_bytes, self.end)
            first, count = (position - self.at) // ELEMENT_BYTES, (stop - position) // ELEMENT_BYTES
            for start, shape in split_into_boxes(self.stored_shape, first, count):
                common = _intersection(Box(start, shape, 0), wanted)
                if common is not None:
                    source, target = common
                    yield FileCopy(self.file, position, shape, source, self.target[target])
                position += prod(shape) * ELEMENT_BYTES

    def run(self, content: torch.Tensor, begin: int) -> None:
        """Copy the elements.

        Args:
            content: [bytes] uint8, bytes of the file; not changed.
            begin: offset of `content` in the file in bytes, a multiple of the element size.
        """
        stored = content[self.at - begin : self.end - begin].view(torch.float32)
        self.target.copy_(stored.view(self.stored_shape)[self.source])


def plan_copies(
    checkpoint: Checkpoint, record: ParameterRecord, start: int, targets: Targets
) -> Iterator[FileCopy]:
    """Yield the copies that fill each element of a range of a parameter's states once.

    Args:
        checkpoint: a checkpoint of any layout.
        record: the parameter.
        start: first element of the targets in the flattened parameter.
        targets: elements to fill, by state; all of the same length.

    Raises:
        CheckpointError: a tensor is absent or has another shape, or an element is not stored
            exactly once; the message names the tensor.
    """
    count = len(next(iter(targets.values())))
    for part in placed_ranges(record.placements, record.parameter.shape, start, count):
        inside = slice(part.offset, part.offset + part.count)
        yield from _copies_of(
            checkpoint, {state: values[inside] for state, values in targets.items()}, part
        )


def stored_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a tensor's entry in the manifest.

    Raises:
        CheckpointError: the checkpoint has no tensor of this name.
    """
    tensor = checkpoint.manifest.tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.folder}: {name} is absent; is it a checkpoint of another model?"
        )
    return tensor


def _copies_of(checkpoint: Checkpoint, targets: Targets, part: PlacedRange) -> Iterator[FileCopy]:
    placement = part.placement
    tensor = stored_tensor(checkpoint, placement.name)
    if tensor.shape != placement.global_shape:
        raise CheckpointError(
            f"{checkpoint.folder}: {placement.name} is of shape {list(tensor.shape)}, the model "
            f"wants {list(placement.global_shape)}; is it another model?"
        )
    ranges = [(stored, list(_boxes(stored.start, stored))) for stored in tensor.stored_ranges]
    for wanted in _boxes(placement.global_start, part):
        found = [
            _Intersection(stored, stored_box, *common)
            for stored, boxes in ranges
            for stored_box in boxes
            if (common := _intersection(stored_box, wanted)) is not None
        ]
        for intersection in _chosen(checkpoint, placement.name, wanted.shape, found):
            yield from intersection.copies(wanted, targets)


def _boxes(box_start: Shape, elements: StoredRange | PlacedRange) -> Iterator[Box]:
    """Split a range of a box into boxes of the global tensor."""
    if isinstance(elements, StoredRange):
        box_shape = elements.shape
    else:
        box_shape = elements.placement.shape
    offset = 0
    for start, shape in split_into_boxes(box_shape, elements.first, elements.count):
        global_start = tuple(a + b for a, b in zip(box_start, start, strict=True))
        yield Box(global_start, shape, offset)
        offset += prod(shape)


@dataclass(frozen=True)
class _Intersection:
    """The intersection of a stored box and a wanted box."""

    stored: StoredRange
    """The range that holds the stored box."""
    box: Box
    """The stored box."""
    source: Slices
    """Slices of the stored box."""
    target: Slices
    """Slices of the wanted box."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(_start_and_shape(self.target)[1])

    def copies(self, wanted: Box, targets: Targets) -> Iterator[FileCopy]:
        """Yield one copy per state."""
        for state, values in targets.items():
            at = self.stored.bytes_at[state] + self.box.offset * ELEMENT_BYTES
            target = wanted.view(values)[self.target]
            yield FileCopy(self.stored.file, at, self.box.shape, self.source, target)


def _chosen(
    checkpoint: Checkpoint, name: str, shape: Shape, found: list[_Intersection]
) -> list[_Intersection]:
    """Choose intersections that together hold every element of a box."""
    may_repeat = checkpoint.manifest.repeats  # elements may be stored more than once
    for each in found if may_repeat or len(found) == 1 else ():
        if each.elements == prod(shape):  # the usual case; filling the mask below takes time
            return [each]
    filled, chosen = np.zeros(shape, dtype=np.bool_), []
    for each in found:
        known = filled[each.target]
        if known.any() and not may_repeat:
            raise CheckpointError(
                f"{checkpoint.folder}: elements of {name} are stored more than once"
            )
        if not known.all():
            chosen.append(each)
            filled[each.target] = True
    if not filled.all():
        raise CheckpointError(
            f"{checkpoint.folder}: {np.count_nonzero(~filled)} of {filled.size} elements of "
            f"{name} are not stored"
        )
    return chosen


def _intersection(stored: Box, wanted: Box) -> tuple[Slices, Slices] | None:
    """Return the intersection of two boxes as slices of each, or None if it is empty."""
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
