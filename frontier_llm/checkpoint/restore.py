"""Fill states of any layout from a checkpoint of any other.

Stored runs and wanted runs are cut into boxes of global tensors; what two boxes have in common is
copied. Of a file only those bytes are read that lie between the first and the last element of a
common part (whole chunks of them, when they are verified).

Memory beside the states: a window of 3 chunks and, for one tensor at a time, one byte an
element of the shard to see that nothing is missing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, STATES, Piece, Tensor
from frontier_llm.checkpoint.pieces import Part, Shape, blocks, covered
from frontier_llm.checkpoint.reader import FileReader
from frontier_llm.checkpoint.scan import Checkpoint, newest
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import ParameterRecord, Placement, StateShard

Slices = tuple[slice, ...]


def restore(
    folder: Path,
    shards: Iterable[StateShard],
    verify: bool = True,
    model: Mapping[str, Shape] | None = None,
) -> dict[str, Any] | None:
    """Load the newest checkpoint of a folder.

    Not collective: every rank reads for itself.

    Args:
        folder: of all checkpoints of a run; it may be absent.
        shards: this rank's states, overwritten.
        verify: whether to compare digests of all that is read.
        model: shapes of all trained tensors of the whole model; a checkpoint that has others is
            refused. None: do not look.

    Returns:
        What was saved as `meta`; None if there is no checkpoint.

    Raises:
        CheckpointError: as `newest` and `load`.
    """
    checkpoint = newest(folder)
    if checkpoint is None:
        return None
    if model is not None:
        _refuse_others(checkpoint, model)
    load(checkpoint, shards, verify)
    return checkpoint.manifest.meta


def load(checkpoint: Checkpoint, shards: Iterable[StateShard], verify: bool = True) -> None:
    """Fill this rank's states.

    Args:
        checkpoint: of any layout.
        shards: of any layout, overwritten; also what another rank saves.
        verify: whether to compare digests of all that is read.

    Raises:
        CheckpointError: a tensor is absent or of another shape, an element is not stored exactly
            once, or a file is damaged; names it. Some states may be overwritten by then.
    """
    copies = [copy for shard in shards for copy in _copies(checkpoint, shard)]
    copies.sort(key=attrgetter("file", "at"))
    for name, group in groupby(copies, key=attrgetter("file")):
        with FileReader(checkpoint, name, verify) as reader:
            for copy in group:
                copy.run(reader, checkpoint.manifest.chunk_bytes)


def read_tensor(checkpoint: Checkpoint, name: str, verify: bool = True) -> dict[str, torch.Tensor]:
    """Read one tensor of the model, whole.

    Returns:
        [global shape] fp32 by state: `master`, `exp_avg`, `exp_avg_sq`.

    Raises:
        CheckpointError: as `load`.
    """
    shape = _stored(checkpoint, name).shape
    zeros = (0,) * len(shape)
    record = ParameterRecord(
        parameter=torch.nn.Parameter(torch.empty(shape, device="meta")),
        unit="",
        placements=(Placement(name, shape, zeros, zeros, shape),),
        decayed=False,
        counted=True,
        tensor_partial=False,
        tied=False,
    )
    states = {state: torch.empty(prod(shape)) for state in STATES}
    load(checkpoint, [StateShard(record, 0, **states)], verify)
    return {state: tensor.view(shape) for state, tensor in states.items()}


@dataclass(frozen=True, eq=False)
class _Copy:
    """A box of elements to be copied from a file into a state."""

    file: str
    at: int
    """Byte of the file where the stored block begins."""
    stored_shape: Shape
    """Of that block."""
    source: Slices
    """What to take of it."""
    target: torch.Tensor
    """Where it goes: a view of the state, in the shape of the slices."""

    def run(self, reader: FileReader, most_bytes: int) -> None:
        """Copy, by at most so many bytes of the file at once (or one row of the last dim)."""
        source = self.source
        row_bytes = ELEMENT_BYTES * prod(self.stored_shape[1:])
        outer = source[0] if source else slice(0, 1)
        rows = max(1, most_bytes // row_bytes)
        target = self.target if source else self.target.view(1)
        for first in range(outer.start, outer.stop, rows):
            last = min(first + rows, outer.stop)
            start = self.at + first * row_bytes
            content = reader.read(start, start + (last - first) * row_bytes)
            block = content.view(np.float32).reshape(last - first, *self.stored_shape[1:])
            part = torch.from_numpy(block[(slice(None), *source[1:])])
            target[first - outer.start : last - outer.start].copy_(part)


def _copies(checkpoint: Checkpoint, shard: StateShard) -> Iterator[_Copy]:
    record = shard.record
    for part in covered(
        record.placements, record.parameter.shape, shard.start, shard.master.numel()
    ):
        yield from _part_copies(checkpoint, shard, part)


def _part_copies(checkpoint: Checkpoint, shard: StateShard, part: Part) -> Iterator[_Copy]:
    """Yield what fills a part, having seen that it fills every element once."""
    box = part.placement
    stored = _stored(checkpoint, box.name)
    if stored.shape != box.global_shape:
        raise CheckpointError(
            f"{checkpoint.folder}: {box.name} is of shape {list(stored.shape)}, the model wants "
            f"{list(box.global_shape)}; is it another model?"
        )
    filled = np.zeros(part.count, dtype=np.bool_)
    pieces = [(piece, list(_global_blocks(piece.start, piece))) for piece in stored.pieces]
    for wanted in _global_blocks(box.global_start, part):
        for piece, its_blocks in pieces:
            for block in its_blocks:
                common = _common(block, wanted)
                if common is not None:
                    _fill(checkpoint, box.name, wanted.view(filled), common[1])
                    yield from _state_copies(shard, part, piece, block, wanted, common)
    if not filled.all():
        raise CheckpointError(
            f"{checkpoint.folder}: {np.count_nonzero(~filled)} of {part.count} elements of "
            f"{box.name} are not stored"
        )


@dataclass(frozen=True)
class _Block:
    """A box of a global tensor whose elements follow each other in a run."""

    start: Shape
    """In the global tensor."""
    shape: Shape
    offset: int
    """First element in the run."""

    def view(self, run: Any) -> Any:
        """Return the block's elements of a run, in its shape."""
        return run[self.offset : self.offset + prod(self.shape)].reshape(self.shape)


def _global_blocks(box_start: Shape, run: Piece | Part) -> Iterator[_Block]:
    box_shape = run.shape if isinstance(run, Piece) else run.placement.shape
    offset = 0
    for start, shape in blocks(box_shape, run.first, run.count):
        place = tuple(a + b for a, b in zip(box_start, start, strict=True))
        yield _Block(place, shape, offset)
        offset += prod(shape)


def _common(stored: _Block, wanted: _Block) -> tuple[Slices, Slices] | None:
    """Return what two blocks have in common, as slices of each; None if nothing."""
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


def _fill(checkpoint: Checkpoint, name: str, filled: npt.NDArray[np.bool_], slices: Slices) -> None:
    if filled[slices].any():
        raise CheckpointError(f"{checkpoint.folder}: elements of {name} are stored more than once")
    filled[slices] = True


def _state_copies(
    shard: StateShard,
    part: Part,
    piece: Piece,
    block: _Block,
    wanted: _Block,
    common: tuple[Slices, Slices],
) -> Iterator[_Copy]:
    for state in STATES:
        run = getattr(shard, state)[part.offset : part.offset + part.count]
        yield _Copy(
            file=piece.file,
            at=piece.bytes_at[state] + block.offset * ELEMENT_BYTES,
            stored_shape=block.shape,
            source=common[0],
            target=wanted.view(run)[common[1]],
        )


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.manifest.tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.folder}: {name} is absent; is it a checkpoint of another model?"
        )
    return tensor


def _refuse_others(checkpoint: Checkpoint, model: Mapping[str, Shape]) -> None:
    others: Sequence[str] = sorted(checkpoint.manifest.tensors.keys() - model.keys())
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.folder}: {others[0]}{more} is stored, the model has no such tensor; is "
            "it a checkpoint of another model?"
        )
