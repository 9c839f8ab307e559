"""Write this rank's file of the run directory from the checkpoint on the disk of its node.

The file is the one that a rank would have written from memory. Both checkpoints store ranges of the
same boxes (blocks of a tensor that one tensor-parallel rank holds), but the ranges may begin and
end elsewhere. Each chunk (the part of a file that has one digest) that is read is compared with its
digest.
"""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from pathlib import Path

import torch

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, StoredRange
from frontier_llm.checkpoint.pacer import Cancellation, Pacer
from frontier_llm.checkpoint.range_reader import FileRange, RangeReader
from frontier_llm.checkpoint.write_plan import PAGE_BYTES, WritePlan
from frontier_llm.errors import CheckpointError

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Segment:
    """Bytes that are copied from a stored file into the file to be written."""

    target: int
    """Offset in this rank's part of the file to be written, in bytes."""
    file: str
    source: int
    """Offset in the stored file in bytes."""
    count: int


class DrainSource:
    """The content of a rank's file, read from its node's disk when the first chunk is wanted.

    There are two buffers of [chunk_bytes] uint8, page-aligned: one to write from, one to read into.
    """

    def __init__(
        self,
        plan: WritePlan,
        node_folder: Path,
        step: int,
        buffers: tuple[torch.Tensor, torch.Tensor],
        pacer: Pacer,
        timeout: timedelta,
    ) -> None:
        self._plan, self._folder, self._step = plan, node_folder, step
        self._pacer, self._timeout = pacer, timeout
        self._buffer, self._read_buffer = buffers
        self._cached: FileRange | None = None
        self._content = self._read_buffer[:0]

    def chunks(self) -> Generator[tuple[torch.Tensor, int], None, None]:
        """Yield the chunks of the file.

        A CheckpointError is raised if the node's checkpoint is absent or damaged, has rounded
        moments, or lacks a range, for example because the layout has changed.
        """
        folder, cancellation = self._folder, self._pacer.cancellation
        checkpoint = open_when_committed(folder, self._step, self._timeout, cancellation)
        if checkpoint.manifest.moments is not None:
            raise CheckpointError(f"{checkpoint.folder} has rounded moments and is not copied")
        plan, position = self._plan, 0
        segments = sorted(_segments(plan, checkpoint), key=attrgetter("target"))
        self._manifest = checkpoint.manifest
        with RangeReader(checkpoint, verify=True) as reader:
            for index in range(len(plan.chunks)):
                begin, size = index * plan.chunk_bytes, plan.chunk_size(index)
                self._pacer.wait(size)
                head = plan.head[begin : begin + size]
                self._buffer[: head.numel()].copy_(head)
                self._buffer[head.numel() : -(-size // PAGE_BYTES) * PAGE_BYTES] = 0
                while position < len(segments):
                    segment = segments[position]
                    if segment.target >= begin + size:
                        break
                    self._copy(reader, segment, begin, size)
                    if segment.target + segment.count > begin + size:
                        break  # the rest belongs to the next chunk
                    position += 1
                yield self._buffer, size

    def _copy(self, reader: RangeReader, segment: Segment, begin: int, size: int) -> None:
        done = max(0, begin - segment.target)
        stop = min(segment.count, begin + size - segment.target)
        while done < stop:
            source = segment.source + done
            content = self._chunk(reader, segment.file, source)
            assert self._cached is not None
            first = source - self._cached.start
            count = min(stop - done, content.numel() - first)
            at = segment.target + done - begin
            self._buffer[at : at + count].copy_(content[first : first + count])
            done += count

    def _chunk(self, reader: RangeReader, name: str, offset: int) -> torch.Tensor:
        manifest = self._manifest
        start = offset // manifest.chunk_bytes * manifest.chunk_bytes
        stop = min(start + manifest.chunk_bytes, manifest.files[name].size)
        wanted = FileRange(name, start, stop)
        if wanted != self._cached:
            self._cached = None
            self._content = reader.read(wanted, self._read_buffer)
            self._cached = wanted
        return self._content


def _segments(plan: WritePlan, checkpoint: Checkpoint) -> Iterator[Segment]:
    for name, tensor in plan.tensors.items():
        found = checkpoint.manifest.tensors.get(name)
        stored = found.stored_ranges if found is not None else ()
        for wanted in tensor.stored_ranges:
            same_box = [s for s in stored if (s.start, s.shape) == (wanted.start, wanted.shape)]
            yield from _segments_of(plan, name, wanted, same_box)


def _segments_of(
    plan: WritePlan, name: str, wanted: StoredRange, stored: list[StoredRange]
) -> Iterator[Segment]:
    first, stop = wanted.first, wanted.first + wanted.count
    while first < stop:
        covering = [s for s in stored if s.first <= first < s.first + s.count]
        if not covering:
            raise CheckpointError(f"element {first} of a block of {name} is not on this node")
        best = max(covering, key=lambda s: s.first + s.count)
        count = min(stop, best.first + best.count) - first
        for state, offset in wanted.bytes_at.items():
            yield Segment(
                offset - plan.offset_bytes + (first - wanted.first) * ELEMENT_BYTES,
                best.file,
                best.bytes_at[state] + (first - best.first) * ELEMENT_BYTES,
                count * ELEMENT_BYTES,
            )
        first += count


def open_when_committed(
    folder: Path, step: int, timeout: timedelta, cancellation: Cancellation
) -> Checkpoint:
    """Open a checkpoint as soon as it has its final name.

    A CheckpointError is raised if the checkpoint is absent or damaged, or was given up.
    """
    path = folder / step_folder(step)
    wait_until_committed(path, timeout, cancellation)
    return Checkpoint.open(path)


def wait_until_committed(path: Path, timeout: timedelta, cancellation: Cancellation) -> None:
    """Wait for a checkpoint that rank 0 has committed: a rank of this node may still rename it."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(f"{path} is absent, although its step is committed")
        cancellation.sleep(_POLL_SECONDS)
