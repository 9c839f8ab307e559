"""Plan which stored elements of a checkpoint are copied into which elements of a rank's states.

Global tensors are the whole tensors of the model. A checkpoint stores contiguous ranges of their
flattened boxes, and a rank wants other ranges. A box is a rectangular block of a tensor. Both kinds
of ranges are split into smaller boxes whose elements are contiguous. The intersection of a stored
box and a wanted box is one copy. A copy that reads two chunks (the parts of a file that have one
digest) is split, so that chunks can be read one after the other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, Moments, StoredRange, Tensor
from frontier_llm.checkpoint.reduced_moments import MOMENTS, decode
from frontier_llm.checkpoint.stored_ranges import (
    PlacedRange,
    Shape,
    placed_ranges,
    split_into_boxes,
)
from frontier_llm.errors import CheckpointError
from frontier_llm.geometry.state_memory import MOMENT_BLOCK_ELEMENTS, MOMENT_BLOCK_WORDS
from frontier_llm.protocols import ParameterRecord

Slices = tuple[slice, ...]
"""A part of a box: one slice per dim."""
Targets = Mapping[str, torch.Tensor]
"""Tensors to fill, [elements], by the name of the state ("master", for example)."""


@dataclass(frozen=True)
class Box:
    """A box of a global tensor whose elements are contiguous in a stored or wanted range."""

    start: Shape
    """Index of the box's first element in the tensor, one number per dim."""
    shape: Shape
    offset: int
    """Index of the box's first element in the range."""

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elements of the box as a view of the values of the range."""
        return values[self.offset : self.offset + prod(self.shape)].view(self.shape)


@dataclass(frozen=True, eq=False)
class Decoder:
    """Fills a part of a state from blocks of reduced moments (reduced_moments.py)."""

    moments: Moments
    signed: bool
    first: int
    """First element of the stored box in the first block."""
    shape: Shape
    source: Slices
    target: torch.Tensor
    """Elements of the state that are overwritten, in the shape of `source`."""

    def run(self, words: torch.Tensor) -> None:
        """Decode [words] fp32 of whole blocks, and copy the elements."""
        values = decode(words, self.moments, signed=self.signed)
        box = values[self.first : self.first + prod(self.shape)].view(self.shape)
        self.target.copy_(box[self.source])


@dataclass(frozen=True, eq=False)
class FileCopy:
    """A copy of a box of elements from a file into a state."""

    file: str
    offset_bytes: int
    """Offset of the stored box in the file."""
    stored_shape: Shape
    source: Slices
    target: torch.Tensor
    """Elements of the state that are overwritten, in the shape of `source`; or [words] of blocks
    that `decoder` reads."""
    decoder: "Decoder | None" = None
    """Decodes reduced moments after the copy has run."""

    @property
    def end(self) -> int:
        """Offset of the end of the stored box in the file, in bytes."""
        return self.offset_bytes + prod(self.stored_shape) * ELEMENT_BYTES

    def split(self, chunk_bytes: int) -> Iterator["FileCopy"]:
        """Split the copy into copies that each read one chunk of the file."""
        if self.offset_bytes // chunk_bytes == (self.end - 1) // chunk_bytes:
            yield self
            return
        wanted = Box(*_start_and_shape(self.source), offset=0)
        position = self.offset_bytes
        while position < self.end:
            stop = min((position // chunk_bytes + 1) * chunk_bytes, self.end)
            first, count = (
                (position - self.offset_bytes) // ELEMENT_BYTES,
                (stop - position) // ELEMENT_BYTES,
            )
            for start, shape in split_into_boxes(self.stored_shape, first, count):
                common = _intersection(Box(start, shape, 0), wanted)
                if common is not None:
                    source, target = common
                    yield FileCopy(self.file, position, shape, source, self.target[target])
                position += prod(shape) * ELEMENT_BYTES

    def finish(self) -> None:
        """Decode what the copy has read, if the moments are reduced."""
        if self.decoder is not None:
            self.decoder.run(self.target)

    def run(self, content: torch.Tensor, begin: int) -> None:
        """Copy from [bytes] uint8, the part of the file from byte `begin` with the stored box."""
        stored = content[self.offset_bytes - begin : self.end - begin].view(torch.float32)
        self.target.copy_(stored.view(self.stored_shape)[self.source])


def plan_copies(
    checkpoint: Checkpoint, record: ParameterRecord, start: int, targets: Targets
) -> Iterator[FileCopy]:
    """Yield copies that together fill each element of a range of a parameter's states once.

    The range begins at element `start` of the flattened parameter; `targets` hold it, by state. A
    CheckpointError names the tensor if it or a state is absent, it has another shape, or an element
    is not stored exactly once.
    """
    count = len(next(iter(targets.values())))
    for part in placed_ranges(record.placements, record.parameter.shape, start, count):
        elements = slice(part.offset, part.offset + part.count)
        yield from _copies_of(
            checkpoint, {state: values[elements] for state, values in targets.items()}, part
        )


def stored_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a tensor's entry in the manifest; raise a CheckpointError if it has none."""
    tensor = checkpoint.manifest.tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.folder}: {name} is absent; is it a checkpoint of another model?"
        )
    return tensor


def _copies_of(checkpoint: Checkpoint, targets: Targets, part: PlacedRange) -> Iterator[FileCopy]:
    placement = part.placement
    tensor = stored_tensor(checkpoint, placement.name)
    if absent := [state for state in targets if state not in tensor.states]:
        raise CheckpointError(
            f"{checkpoint.folder}: {placement.name} has no state {absent[0]}, only "
            f"{', '.join(tensor.states)}; was it frozen, or is it of another optimizer?\n"
            "  do: freeze it, or use that optimizer; or save to another folder, and read weights "
            "alone before shard(): from frontier_llm.checkpoint.torch_dcp import Reader; "
            'torch.distributed.checkpoint.load({"model": dict(module.named_parameters())}, '
            f"storage_reader=Reader({str(checkpoint.folder)!r}))"
        )
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
        moments = checkpoint.manifest.moments
        for intersection in _choose(checkpoint, placement.name, wanted.shape, found):
            yield from intersection.copies(wanted, targets, moments)


def _boxes(box_start: Shape, elements: StoredRange | PlacedRange) -> Iterator[Box]:
    """Split a range of a flattened box into boxes of the global tensor."""
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
    stored: StoredRange
    box: Box
    source: Slices
    target: Slices

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(_start_and_shape(self.target)[1])

    def copies(self, wanted: Box, targets: Targets, moments: Moments | None) -> Iterator[FileCopy]:
        """Yield one copy per state; `targets` are the values of the range of the wanted box."""
        for state, values in targets.items():
            target = wanted.view(values)[self.target]
            if moments is not None and state in MOMENTS:
                yield self._reduced(state, target, moments)
                continue
            offset_bytes = self.stored.bytes_at[state] + self.box.offset * ELEMENT_BYTES
            yield FileCopy(self.stored.file, offset_bytes, self.box.shape, self.source, target)

    def _reduced(self, state: str, target: torch.Tensor, moments: Moments) -> FileCopy:
        """Return the copy of the blocks that hold the stored box, which decodes them."""
        block, size = MOMENT_BLOCK_ELEMENTS, MOMENT_BLOCK_WORDS[moments]
        first, last = (
            self.box.offset // block,
            -(-(self.box.offset + prod(self.box.shape)) // block),
        )
        start, count = first * size, (last - first) * size
        decoder = Decoder(
            moments,
            state == "exp_avg",
            self.box.offset - first * block,
            self.box.shape,
            self.source,
            target,
        )
        offset_bytes = self.stored.bytes_at[state] + start * ELEMENT_BYTES
        words = torch.empty(count)
        return FileCopy(
            self.stored.file, offset_bytes, (count,), (slice(0, count),), words, decoder
        )


def _choose(
    checkpoint: Checkpoint, name: str, shape: Shape, found: list[_Intersection]
) -> list[_Intersection]:
    """Choose intersections that together hold every element of a wanted box."""
    may_repeat = checkpoint.manifest.repeats  # elements may be stored more than once
    for intersection in found if may_repeat or len(found) == 1 else ():
        if intersection.elements == prod(shape):  # the usual case, faster than the mask below
            return [intersection]
    filled, chosen = np.zeros(shape, dtype=np.bool_), []
    for intersection in found:
        already_filled = filled[intersection.target]
        if already_filled.any() and not may_repeat:
            raise CheckpointError(
                f"{checkpoint.folder}: elements of {name} are stored more than once"
            )
        if not already_filled.all():
            chosen.append(intersection)
            filled[intersection.target] = True
    if not filled.all():
        raise CheckpointError(
            f"{checkpoint.folder}: {np.count_nonzero(~filled)} of {filled.size} elements of "
            f"{name} are not stored"
        )
    return chosen


def _intersection(stored: Box, wanted: Box) -> tuple[Slices, Slices] | None:
    """Return the intersection as slices of the stored and of the wanted box; None if empty."""
    source, target = [], []
    for stored_start, stored_size, wanted_start, wanted_size in zip(
        stored.start, stored.shape, wanted.start, wanted.shape, strict=True
    ):
        start = max(stored_start, wanted_start)
        stop = min(stored_start + stored_size, wanted_start + wanted_size)
        if start >= stop:
            return None
        source.append(slice(start - stored_start, stop - stored_start))
        target.append(slice(start - wanted_start, stop - wanted_start))
    return tuple(source), tuple(target)


def _start_and_shape(slices: Slices) -> tuple[Shape, Shape]:
    return tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices)
