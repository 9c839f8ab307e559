"""What one rank writes: a safetensors file, element by element, and its part of the manifest.

Made once for a rank's shards and used for every checkpoint: the tensors stay where they are, only
their values change.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from frontier_llm.checkpoint.manifest import (
    ELEMENT_BYTES,
    STATES,
    FilePart,
    Piece,
    RankRecord,
    Tensor,
)
from frontier_llm.checkpoint.names import node_file, rank_file
from frontier_llm.checkpoint.pieces import Part, covered
from frontier_llm.protocols import StateShard

PAGE_BYTES = 4096
"""Data begins at a multiple of this, as O_DIRECT wants it."""
_BYTES = {"F32": ELEMENT_BYTES, "U8": 1}
Entries = Sequence[tuple[str, int]]
"""(key, fp32 elements) of what a rank writes, in order."""


@dataclass(frozen=True, eq=False)
class Copy:
    """Elements of a state that lie in one chunk."""

    source: torch.Tensor
    """[elements] fp32, a view of the state."""
    at: int
    """Where they go: element of the chunk."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A rank's file, cut into chunks."""

    name: str
    """Of the file."""
    at: int
    """First byte of this rank's part of the file."""
    size: int
    """Bytes of that part; 0: this rank writes none."""
    total: int | None
    """Bytes of a file that ranks share; None: it is this rank's alone."""
    chunk_bytes: int
    """Bytes of every chunk but the last."""
    head: torch.Tensor
    """[bytes] uint8, whole pages: what precedes the data in this part."""
    chunks: tuple[tuple[Copy, ...], ...]
    """The data of each chunk."""
    tensors: dict[str, Tensor]
    """This rank's part of the manifest."""
    device: torch.device
    """Where the states are."""

    def chunk_size(self, index: int) -> int:
        """Return the bytes of a chunk."""
        return min(self.chunk_bytes, self.size - index * self.chunk_bytes)

    def fill(self, index: int, buffer: torch.Tensor, non_blocking: bool = False) -> None:
        """Copy a chunk's content from the states.

        Args:
            index: of the chunk.
            buffer: [chunk_bytes] uint8 on the host, overwritten.
            non_blocking: return before copies from a device are done.
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
        """Say what was written.

        Args:
            file: its size and digests; None where the plan is empty.
        """
        return RankRecord(files={self.name: file} if file else {}, tensors=self.tensors)


Exchange = Callable[[Entries], Sequence[Entries]]
"""Tells the ranks that share a file what this one writes; returns what each of them does."""


def make_plan(
    shards: Sequence[StateShard],
    rank: int,
    chunk_bytes: int,
    together: range | None = None,
    exchange: Exchange | None = None,
    *,
    everything: bool = False,
) -> Plan:
    """Lay a rank's states out in a file: all masters, then all first, then all second moments.

    Padding is left out, and what another rank counts.

    Args:
        shards: what the rank holds and nobody else saves.
        rank: names the file.
        chunk_bytes: a multiple of a page.
        together: the ranks that share a file; None: each has its own.
        exchange: where they do: how they tell each other what they write.
        everything: whether to save what another rank counts as well.
    """
    parts = [
        (shard, part)
        for shard in shards
        if everything or shard.record.counted
        for part in covered(
            shard.record.placements, shard.record.parameter.shape, shard.start, len(shard.master)
        )
    ]
    prefix = f"{rank:05d}/" if together else ""  # several ranks have pieces of one tensor
    keys = [f"{prefix}{key}" for key in _keys([part for _, part in parts])]
    runs = [
        (f"{key}.{state}", getattr(shard, state)[part.offset : part.offset + part.count])
        for state in STATES
        for key, (shard, part) in zip(keys, parts, strict=True)
    ]
    entries = [(key, run.numel()) for key, run in runs]
    if together is None or exchange is None:
        name, place = rank_file(rank), _alone(entries)
    else:
        name = node_file(together.start)
        place = _among(exchange(entries), rank - together.start, chunk_bytes)
    chunks, places = _cut(runs, place.head.numel(), chunk_bytes)
    tensors = _tensors(
        name, keys, [part for _, part in parts], {k: place.at + b for k, b in places.items()}
    )
    device = runs[0][1].device if runs else torch.device("cpu")
    return Plan(
        name, place.at, place.size, place.total, chunk_bytes, place.head, chunks, tensors, device
    )


@dataclass(frozen=True)
class _Place:
    """Where a rank's part lies in its file."""

    head: torch.Tensor
    at: int
    size: int
    total: int | None


def _alone(entries: Entries) -> _Place:
    head = _head([(key, "F32", count) for key, count in entries], PAGE_BYTES)
    size = head.numel() + sum(count for _, count in entries) * ELEMENT_BYTES
    return _Place(head, 0, size, None)


def _among(everybody: Sequence[Entries], index: int, chunk_bytes: int) -> _Place:
    """Lay out a file that ranks share: each one's part begins with a chunk.

    The header names everybody's entries, and the gaps between parts, since the format has none.
    The first rank that has something to write writes it.
    """
    writers = [rank for rank, entries in enumerate(everybody) if entries]
    named: list[tuple[str, str, int]] = []
    starts, position = {}, 0
    for rank in writers:
        starts[rank] = position
        named += [(key, "F32", count) for key, count in everybody[rank]]
        position += sum(count for _, count in everybody[rank]) * ELEMENT_BYTES
        gap = -position % chunk_bytes
        if gap and rank != writers[-1]:
            named.append((f"gap.{rank}", "U8", gap))
            position += gap
    head = _head(named, chunk_bytes)
    empty = torch.empty(0, dtype=torch.uint8)
    if index not in starts:
        return _Place(empty, 0, 0, None)
    total = head.numel() + position
    first = index == writers[0]
    at = 0 if first else head.numel() + starts[index]
    following = [starts[rank] for rank in writers if rank > index]
    end = head.numel() + following[0] if following else total
    return _Place(head if first else empty, at, end - at, total)


def _keys(parts: Sequence[Part]) -> list[str]:
    """Name each part in the file: after its tensor, numbered where that has several here."""
    seen: dict[str, int] = {}
    keys = []
    for part in parts:
        name = part.placement.name
        number = seen[name] = seen.get(name, -1) + 1
        keys.append(f"{name}.{number}" if number else name)
    return keys


def _head(named: Sequence[tuple[str, str, int]], multiple: int) -> torch.Tensor:
    """Return a safetensors header, padded with blanks; nothing for no entries.

    Args:
        named: (key, dtype, elements), one behind the other.
        multiple: of bytes, to which it is padded.
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


def _cut(
    runs: Sequence[tuple[str, torch.Tensor]], begin: int, chunk_bytes: int
) -> tuple[tuple[tuple[Copy, ...], ...], dict[str, int]]:
    """Spread runs over chunks; return these, and at which byte of the file each run begins."""
    chunk_elements = chunk_bytes // ELEMENT_BYTES
    position = begin // ELEMENT_BYTES
    last = position + sum(run.numel() for _, run in runs)
    chunks: list[list[Copy]] = [[] for _ in range(-(-last // chunk_elements))]
    places = {}
    for key, run in runs:
        assert run.dtype == torch.float32, (key, run.dtype)
        places[key] = position * ELEMENT_BYTES
        done = 0
        while done < run.numel():
            index, at = divmod(position, chunk_elements)
            count = min(chunk_elements - at, run.numel() - done)
            chunks[index].append(Copy(run[done : done + count], at))
            done, position = done + count, position + count
    return tuple(map(tuple, chunks)), places


def _tensors(
    file: str, keys: Sequence[str], parts: Sequence[Part], places: dict[str, int]
) -> dict[str, Tensor]:
    found: dict[str, list[Piece]] = {}
    shapes = {}
    for key, part in zip(keys, parts, strict=True):
        box = part.placement
        shapes[box.name] = box.global_shape
        piece = Piece(
            file=file,
            start=box.global_start,
            shape=box.shape,
            first=part.first,
            count=part.count,
            keys={state: f"{key}.{state}" for state in STATES},
            bytes_at={state: places[f"{key}.{state}"] for state in STATES},
        )
        found.setdefault(box.name, []).append(piece)
    return {name: Tensor(shape=shapes[name], pieces=tuple(ps)) for name, ps in found.items()}
