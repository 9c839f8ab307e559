"""Lay out the file that one rank writes: a safetensors file, and its part of the manifest.

A plan is made once for a rank's shards and used for every checkpoint: the state tensors keep their
memory, and only their values change.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from frontier_llm.checkpoint.folders import node_file_name, rank_file_name
from frontier_llm.checkpoint.manifest import (
    ELEMENT_BYTES,
    STATES,
    FilePart,
    RankRecord,
    StoredRange,
    Tensor,
)
from frontier_llm.checkpoint.stored_ranges import PlacedRange, placed_ranges
from frontier_llm.protocols import StateShard

PAGE_BYTES = 4096
"""Alignment of the data in a file, as O_DIRECT requires."""
_BYTES = {"F32": ELEMENT_BYTES, "U8": 1}
Entries = Sequence[tuple[str, int]]
"""(key, number of fp32 elements) of each entry that a rank writes, in order."""


@dataclass(frozen=True, eq=False)
class ChunkCopy:
    """A copy of elements of a state into one chunk."""

    source: torch.Tensor
    """[elements] fp32, a view of the state."""
    at: int
    """Index of the first element in the chunk."""


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Layout of a rank's file, or of its part of a shared file, in chunks."""

    name: str
    """Name of the file."""
    at: int
    """Offset of this rank's part in the file in bytes."""
    size: int
    """Size of this rank's part in bytes; 0 if this rank writes nothing."""
    total: int | None
    """Size in bytes of a file that ranks share; None if this rank writes the file alone."""
    chunk_bytes: int
    """Size of every chunk but the last in bytes."""
    head: torch.Tensor
    """[bytes] uint8, a multiple of a page: header before the data in this rank's part."""
    chunks: tuple[tuple[ChunkCopy, ...], ...]
    """Copies that fill each chunk."""
    tensors: dict[str, Tensor]
    """This rank's part of the manifest."""
    device: torch.device
    """Device of the states."""

    def chunk_size(self, index: int) -> int:
        """Return the size of a chunk in bytes."""
        return min(self.chunk_bytes, self.size - index * self.chunk_bytes)

    def fill(self, index: int, buffer: torch.Tensor, non_blocking: bool = False) -> None:
        """Copy the content of a chunk from the header and the states.

        Args:
            index: index of the chunk.
            buffer: [chunk_bytes] uint8 on the host, overwritten.
            non_blocking: whether to return before copies from a device are done.
        """
        begin = index * self.chunk_bytes
        head = self.head[begin : begin + self.chunk_bytes]
        buffer[: head.numel()].copy_(head)
        elements = buffer.view(torch.float32)
        end = head.numel() // ELEMENT_BYTES
        for copy in self.chunks[index]:
            end = copy.at + copy.source.numel()
            elements[copy.at : end].copy_(copy.source, non_blocking=non_blocking)
        elements[end : -(-self.chunk_size(index) // ELEMENT_BYTES)] = 0

    def record(self, file: FilePart | None) -> RankRecord:
        """Return the record of what was written.

        Args:
            file: size and digests of the written part; None if the plan is empty.
        """
        return RankRecord(files={self.name: file} if file else {}, tensors=self.tensors)


Exchange = Callable[[Entries], Sequence[Entries]]
"""Sends this rank's entries to the ranks that share the file; returns the entries of each."""


def make_write_plan(
    shards: Sequence[StateShard],
    rank: int,
    chunk_bytes: int,
    file_ranks: range | None = None,
    exchange: Exchange | None = None,
    *,
    everything: bool = False,
) -> WritePlan:
    """Lay out a rank's file: all masters, then all first moments, then all second moments.

    Padding is not stored. Neither are shards that another rank counts, unless `everything` is set.

    Args:
        shards: shards of this rank; no replica of it saves the same ones.
        rank: rank of this process; part of the file's name.
        chunk_bytes: size of a chunk in bytes, a multiple of a page.
        file_ranks: ranks that share one file; None if each rank writes its own.
        exchange: function that exchanges entries among `file_ranks`.
        everything: whether to save also the shards that another rank counts.
    """
    parts = [
        (shard, part)
        for shard in shards
        if everything or shard.record.counted
        for part in placed_ranges(
            shard.record.placements, shard.record.parameter.shape, shard.start, len(shard.master)
        )
    ]
    # several ranks may store ranges of one tensor in a shared file: their keys must differ
    prefix = f"{rank:05d}/" if file_ranks else ""
    keys = [f"{prefix}{key}" for key in _keys([part for _, part in parts])]
    values = [
        (f"{key}.{state}", getattr(shard, state)[part.offset : part.offset + part.count])
        for state in STATES
        for key, (shard, part) in zip(keys, parts, strict=True)
    ]
    entries = [(key, tensor.numel()) for key, tensor in values]
    if file_ranks is None or exchange is None:
        name, extent = rank_file_name(rank), _extent_alone(entries)
    else:
        name = node_file_name(file_ranks.start)
        extent = _extent_among(exchange(entries), rank - file_ranks.start, chunk_bytes)
    chunks, offsets = _split_into_chunks(values, extent.head.numel(), chunk_bytes)
    tensors = _tensors(
        name, keys, [part for _, part in parts], {k: extent.at + b for k, b in offsets.items()}
    )
    return WritePlan(
        name=name,
        at=extent.at,
        size=extent.size,
        total=extent.total,
        chunk_bytes=chunk_bytes,
        head=extent.head,
        chunks=chunks,
        tensors=tensors,
        device=values[0][1].device if values else torch.device("cpu"),
    )


@dataclass(frozen=True)
class _Extent:
    """Position of a rank's part in its file; the fields are those of `WritePlan`."""

    head: torch.Tensor
    at: int
    size: int
    total: int | None


def _extent_alone(entries: Entries) -> _Extent:
    head = _head([(key, "F32", count) for key, count in entries], PAGE_BYTES)
    size = head.numel() + sum(count for _, count in entries) * ELEMENT_BYTES
    return _Extent(head, 0, size, None)


def _extent_among(entries_by_rank: Sequence[Entries], index: int, chunk_bytes: int) -> _Extent:
    """Lay out a shared file in which each rank's part begins with a chunk.

    The header lists the entries of all ranks, and the gaps between parts as entries too, because
    safetensors allows no unnamed bytes. The first rank with entries writes the header.
    """
    writers = [rank for rank, entries in enumerate(entries_by_rank) if entries]
    named: list[tuple[str, str, int]] = []
    starts, position = {}, 0
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
        return _Extent(empty, 0, 0, None)
    total = head.numel() + position
    first = index == writers[0]
    at = 0 if first else head.numel() + starts[index]
    following = [starts[rank] for rank in writers if rank > index]
    end = head.numel() + following[0] if following else total
    return _Extent(head if first else empty, at, end - at, total)


def _keys(parts: Sequence[PlacedRange]) -> list[str]:
    """Return a key per range: its tensor's name, numbered from the tensor's second range on."""
    seen: dict[str, int] = {}
    keys = []
    for part in parts:
        name = part.placement.name
        number = seen[name] = seen.get(name, -1) + 1
        keys.append(f"{name}.{number}" if number else name)
    return keys


def _head(named: Sequence[tuple[str, str, int]], multiple: int) -> torch.Tensor:
    """Return a safetensors header, padded with blanks; an empty tensor if there are no entries.

    Args:
        named: (key, dtype, number of elements) of each entry, in the order of the data.
        multiple: the header's size is padded to a multiple of this number of bytes.
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
    values: Sequence[tuple[str, torch.Tensor]], begin: int, chunk_bytes: int
) -> tuple[tuple[tuple[ChunkCopy, ...], ...], dict[str, int]]:
    """Distribute values over chunks.

    Args:
        values: (key, [elements] fp32) of each entry, in order.
        begin: offset of the first entry in bytes.
        chunk_bytes: size of a chunk in bytes.

    Returns:
        The copies that fill each chunk, and the offset of each entry in bytes, by key.
    """
    chunk_elements = chunk_bytes // ELEMENT_BYTES
    position = begin // ELEMENT_BYTES
    last = position + sum(tensor.numel() for _, tensor in values)
    chunks: list[list[ChunkCopy]] = [[] for _ in range(-(-last // chunk_elements))]
    offsets = {}
    for key, tensor in values:
        assert tensor.dtype == torch.float32, (key, tensor.dtype)
        offsets[key] = position * ELEMENT_BYTES
        done = 0
        while done < tensor.numel():
            index, at = divmod(position, chunk_elements)
            count = min(chunk_elements - at, tensor.numel() - done)
            chunks[index].append(ChunkCopy(tensor[done : done + count], at))
            done, position = done + count, position + count
    return tuple(map(tuple, chunks)), offsets


def _tensors(
    file: str, keys: Sequence[str], parts: Sequence[PlacedRange], offsets: dict[str, int]
) -> dict[str, Tensor]:
    found: dict[str, list[StoredRange]] = {}
    shapes = {}
    for key, part in zip(keys, parts, strict=True):
        box = part.placement
        shapes[box.name] = box.global_shape
        stored = StoredRange(
            file=file,
            start=box.global_start,
            shape=box.shape,
            first=part.first,
            count=part.count,
            keys={state: f"{key}.{state}" for state in STATES},
            bytes_at={state: offsets[f"{key}.{state}"] for state in STATES},
        )
        found.setdefault(box.name, []).append(stored)
    return {
        name: Tensor(shape=shapes[name], stored_ranges=tuple(ranges))
        for name, ranges in found.items()
    }
