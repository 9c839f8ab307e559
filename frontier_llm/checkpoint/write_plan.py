"""Lay out the safetensors file that one rank writes, and the rank's part of the manifest.

The plan says which elements of the rank's states fill each chunk (the part of a file that is
written at once). It is made once and used for every checkpoint, because the state tensors keep
their memory and only their values change.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from frontier_llm.checkpoint.folders import node_file_name, rank_file_name
from frontier_llm.checkpoint.manifest import (
    ELEMENT_BYTES,
    FilePart,
    Moments,
    RankRecord,
    StoredRange,
    Tensor,
)
from frontier_llm.checkpoint.reduced_moments import MOMENTS, ReducedWords
from frontier_llm.checkpoint.stored_ranges import PlacedRange, placed_ranges
from frontier_llm.protocols import State, StateShard

PAGE_BYTES = 4096
"""Alignment of the data in a file, as O_DIRECT requires."""
_BYTES = {"F32": ELEMENT_BYTES, "U8": 1}
"""Size of an element in bytes, by dtype of safetensors."""
Entries = Sequence[tuple[str, int]]
"""(key, number of fp32 elements) of each safetensors entry that a rank writes, in order."""


@dataclass(frozen=True, eq=False)
class ChunkCopy:
    """A copy of elements of a state into one chunk."""

    source: State
    """[elements], a view of the state."""
    first: int
    """Position of the first element in the chunk, in fp32 elements."""


@dataclass(frozen=True, eq=False)
class FilePlan:
    """Layout of a rank's file, or of its part of a shared file, in chunks."""

    name: str
    offset_bytes: int
    size: int
    """Size of this rank's part in bytes; 0 if this rank writes nothing."""
    total: int | None
    """Size in bytes of a file that ranks share; None if this rank writes the file alone."""
    chunk_bytes: int
    """Size of every chunk but the last."""
    tensors: dict[str, Tensor]

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return -(-self.size // self.chunk_bytes)

    def chunk_size(self, index: int) -> int:
        """Return the size of a chunk in bytes."""
        return min(self.chunk_bytes, self.size - index * self.chunk_bytes)

    def record(self, file: FilePart | None) -> RankRecord:
        """Return the manifest's description of what was written; nothing if the plan is empty."""
        return RankRecord(files={self.name: file} if file else {}, tensors=self.tensors)


@dataclass(frozen=True, eq=False)
class WritePlan(FilePlan):
    """Layout of a file that is written from states."""

    head: torch.Tensor
    """[bytes] uint8, whole pages: the header of the file, if it belongs to this rank's part."""
    chunks: tuple[tuple[ChunkCopy, ...], ...]
    """For each chunk, the copies that fill it."""
    device: torch.device

    def fill(self, index: int, buffer: torch.Tensor, non_blocking: bool = False) -> None:
        """Copy the content of a chunk from the header and the states to [chunk_bytes] uint8.

        The buffer is on the host. With `non_blocking`, copies from a GPU may not be done on return.
        """
        begin = index * self.chunk_bytes
        head = self.head[begin : begin + self.chunk_bytes]
        buffer[: head.numel()].copy_(head)
        elements = buffer.view(torch.float32)
        end = head.numel() // ELEMENT_BYTES
        for copy in self.chunks[index]:
            end = copy.first + copy.source.numel()
            source = copy.source
            values = source.float() if isinstance(source, torch.Tensor) else source.decode()
            elements[copy.first : end].copy_(values, non_blocking=non_blocking)
        elements[end : -(-self.chunk_size(index) // ELEMENT_BYTES)] = 0


Exchange = Callable[[Entries], Sequence[Entries]]
"""A function that sends this rank's entries to the ranks that share its file, and returns the
entries of each of these ranks."""


def make_write_plan(
    shards: Sequence[StateShard],
    rank: int,
    chunk_bytes: int,
    file_ranks: range | None = None,
    exchange: Exchange | None = None,
    *,
    everything: bool = False,
    moments: Moments | None = None,
) -> WritePlan:
    """Lay out a rank's file: all elements of one state, then all of the next.

    Padding is not stored. If several ranks hold the same parameter, for example a norm that tensor
    parallelism does not split, `record.counted` is set on exactly one of them, which stores it;
    `everything` stores shards also where it is not set. If `file_ranks` write one file together,
    `exchange` exchanges entries between them. A chunk is a multiple of a page.
    """
    parts = list(_stored_parts(shards, everything=everything))
    # several ranks may store ranges of one tensor in a shared file: their keys must differ
    prefix = f"{rank:05d}/" if file_ranks else ""
    keys = [f"{prefix}{key}" for key in _keys([part for _, part in parts])]
    values = [
        (f"{key}.{state}", _stored(shard, state, part, moments))
        for state in dict.fromkeys(state for shard, _ in parts for state in shard.states)
        for key, (shard, part) in zip(keys, parts, strict=True)
        if state in shard.states
    ]
    entries = [(key, tensor.numel()) for key, tensor in values]
    if file_ranks is None or exchange is None:
        name, part_of_file = rank_file_name(rank), _whole_file(entries)
    else:
        name = node_file_name(file_ranks.start)
        index = rank - file_ranks.start
        part_of_file = _part_of_shared_file(exchange(entries), index, chunk_bytes)
    chunks, offsets = _split_into_chunks(values, part_of_file.head.numel(), chunk_bytes)
    offsets = {key: part_of_file.offset_bytes + offset for key, offset in offsets.items()}
    tensors = _describe_tensors(name, keys, parts, offsets)
    return WritePlan(
        name=name,
        **part_of_file._asdict(),
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        tensors=tensors,
        device=values[0][1].device if values else torch.device("cpu"),
    )


def _stored_parts(
    shards: Sequence[StateShard], *, everything: bool
) -> Iterator[tuple[StateShard, PlacedRange]]:
    for shard in shards:
        if everything or shard.record.counted:
            record = shard.record
            for part in placed_ranges(
                record.placements, record.parameter.shape, shard.start, shard.elements
            ):
                yield shard, part


def _stored(shard: StateShard, state: str, part: PlacedRange, moments: Moments | None) -> State:
    values = shard.states[state][part.offset : part.offset + part.count]
    if moments is None or state not in MOMENTS:
        return values
    assert isinstance(values, torch.Tensor)  # the configuration refuses other optimizers
    return ReducedWords.of(values, moments, state)


class _PartOfFile(NamedTuple):
    """Position of a rank's part in its file. `WritePlan` has fields with the same meaning."""

    head: torch.Tensor
    offset_bytes: int
    size: int
    total: int | None


def _whole_file(entries: Entries) -> _PartOfFile:
    head = _head([(key, "F32", count) for key, count in entries], PAGE_BYTES)
    size = head.numel() + sum(count for _, count in entries) * ELEMENT_BYTES
    return _PartOfFile(head, 0, size, None)


def _part_of_shared_file(
    entries_by_rank: Sequence[Entries], index: int, chunk_bytes: int
) -> _PartOfFile:
    """Lay out a file that several ranks write, and return the part of the rank at `index`.

    Each part begins at a multiple of `chunk_bytes`. The header lists the entries of all ranks, and
    also the gaps between the parts, because safetensors allows no unnamed bytes. The first rank
    that has entries writes the header.
    """
    writers = [rank for rank, entries in enumerate(entries_by_rank) if entries]
    named: list[tuple[str, str, int]] = []
    starts, position = {}, 0  # both count the bytes after the header
    for rank in writers:
        starts[rank] = position
        named += [(key, "F32", count) for key, count in entries_by_rank[rank]]
        position += sum(count for _, count in entries_by_rank[rank]) * ELEMENT_BYTES
        gap = -position % chunk_bytes
        if gap and rank != writers[-1]:
            named.append((f"gap.{rank}", "U8", gap))
            position += gap
    head = _head(named, chunk_bytes)
    empty = torch.empty(0, dtype=torch.uint8)
    if index not in starts:
        return _PartOfFile(empty, 0, 0, None)
    total = head.numel() + position
    writes_head = index == writers[0]
    start = 0 if writes_head else head.numel() + starts[index]
    later_starts = [starts[rank] for rank in writers if rank > index]
    stop = head.numel() + later_starts[0] if later_starts else total
    return _PartOfFile(head if writes_head else empty, start, stop - start, total)


def _keys(parts: Sequence[PlacedRange]) -> list[str]:
    """Return a key per range: the name of its tensor, with a number if it is not the first range.

    For example, three ranges of the tensor `x` have the keys `x`, `x.1` and `x.2`.
    """
    last_number: dict[str, int] = {}
    keys = []
    for part in parts:
        name = part.placement.name
        number = last_number[name] = last_number.get(name, -1) + 1
        keys.append(f"{name}.{number}" if number else name)
    return keys


def _head(named: Sequence[tuple[str, str, int]], multiple: int) -> torch.Tensor:
    """Return a safetensors header, [bytes] uint8, of (key, dtype, elements) in the order of data.

    It is padded with blanks to a multiple of `multiple` bytes, and empty without entries.
    """
    if not named:
        return torch.empty(0, dtype=torch.uint8)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, dtype, count in named:
        end = position + count * _BYTES[dtype]
        entries[key] = {"dtype": dtype, "shape": [count], "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % multiple)
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)


def _split_into_chunks(
    values: Sequence[tuple[str, State]], begin: int, chunk_bytes: int
) -> tuple[tuple[tuple[ChunkCopy, ...], ...], dict[str, int]]:
    """Return the copies that fill each chunk of a rank's part, and the byte offset of each entry.

    The values are (key, [elements] fp32) in order; the first one begins at byte `begin`.
    """
    chunk_elements = chunk_bytes // ELEMENT_BYTES
    position = begin // ELEMENT_BYTES
    last = position + sum(tensor.numel() for _, tensor in values)
    chunks: list[list[ChunkCopy]] = [[] for _ in range(-(-last // chunk_elements))]
    offsets = {}
    for key, tensor in values:
        assert tensor.dtype in (torch.float32, torch.bfloat16, torch.float16), (key, tensor.dtype)
        offsets[key] = position * ELEMENT_BYTES
        done = 0
        while done < tensor.numel():
            index, first = divmod(position, chunk_elements)
            count = min(chunk_elements - first, tensor.numel() - done)
            chunks[index].append(ChunkCopy(tensor[done : done + count], first))
            done, position = done + count, position + count
    return tuple(map(tuple, chunks)), offsets


def _describe_tensors(
    file: str,
    keys: Sequence[str],
    parts: Sequence[tuple[StateShard, PlacedRange]],
    offsets: dict[str, int],
) -> dict[str, Tensor]:
    found: dict[str, list[StoredRange]] = {}
    shapes = {}
    for key, (shard, part) in zip(keys, parts, strict=True):
        box = part.placement
        shapes[box.name] = box.global_shape
        stored = StoredRange(
            file=file,
            start=box.global_start,
            shape=box.shape,
            first=part.first,
            count=part.count,
            keys={state: f"{key}.{state}" for state in shard.states},
            bytes_at={state: offsets[f"{key}.{state}"] for state in shard.states},
        )
        found.setdefault(box.name, []).append(stored)
    return {
        name: Tensor(shape=shapes[name], stored_ranges=tuple(ranges))
        for name, ranges in found.items()
    }


def part_of(shards: Iterable[StateShard], number: int, count: int) -> Iterator[StateShard]:
    """Yield one of `count` equal parts of a rank's states.

    Ranks of different replicas that hold the same states share the work: each saves one part.
    Shards that are not counted on this rank (`record.counted`) are saved by another rank and left
    out.
    """
    shards = [shard for shard in shards if shard.record.counted]
    total = sum(shard.elements for shard in shards)
    # the part is elements [first, stop), counted from the beginning of the current shard
    first, stop = total * number // count, total * (number + 1) // count
    for shard in shards:
        begin, end = max(first, 0), min(stop, shard.elements)
        if begin < end:
            states = {name: state[begin:end] for name, state in shard.states.items()}
            yield StateShard(shard.record, shard.start + begin, states)
        first, stop = first - shard.elements, stop - shard.elements
