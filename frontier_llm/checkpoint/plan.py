"""What one rank writes: a safetensors file, element by element, and its part of the manifest.

Made once for a rank's shards and used for every checkpoint: the tensors stay where they are, only
their values change.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from frontier_llm.checkpoint.manifest import (
    ELEMENT_BYTES,
    STATES,
    File,
    Piece,
    RankRecord,
    Tensor,
    rank_file,
)
from frontier_llm.checkpoint.pieces import Part, covered
from frontier_llm.protocols import StateShard

PAGE_BYTES = 4096
"""Data begins at a multiple of this, as O_DIRECT wants it."""


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
    size: int
    """Bytes of the file; 0: this rank writes none."""
    chunk_bytes: int
    """Bytes of every chunk but the last."""
    head: torch.Tensor
    """[bytes] uint8, whole pages: what precedes the data."""
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
        for copy in self.chunks[index]:
            target = elements[copy.at : copy.at + copy.source.numel()]
            target.copy_(copy.source, non_blocking=non_blocking)

    def record(self, file: File | None) -> RankRecord:
        """Say what was written.

        Args:
            file: its size and digests; None where the plan is empty.
        """
        return RankRecord(files={self.name: file} if file else {}, tensors=self.tensors)


def make_plan(shards: Sequence[StateShard], rank: int, chunk_bytes: int) -> Plan:
    """Lay a rank's states out in a file: all masters, then all first, then all second moments.

    Padding, and what another rank counts, is left out.

    Args:
        shards: what the rank holds and nobody else saves.
        rank: names the file.
        chunk_bytes: a multiple of a page.
    """
    parts = [
        (shard, part)
        for shard in shards
        if shard.record.counted
        for part in covered(
            shard.record.placements, shard.record.parameter.shape, shard.start, len(shard.master)
        )
    ]
    keys = _keys([part for _, part in parts])
    runs = [
        (f"{key}.{state}", getattr(shard, state)[part.offset : part.offset + part.count])
        for state in STATES
        for key, (shard, part) in zip(keys, parts, strict=True)
    ]
    head = _head(runs)
    chunks, places = _cut(runs, head.numel(), chunk_bytes)
    size = (head.numel() + sum(run.numel() for _, run in runs) * ELEMENT_BYTES) if runs else 0
    tensors = _tensors(rank_file(rank), keys, [part for _, part in parts], places)
    device = runs[0][1].device if runs else torch.device("cpu")
    return Plan(rank_file(rank), size, chunk_bytes, head, chunks, tensors, device)


def _keys(parts: Sequence[Part]) -> list[str]:
    """Name each part in the file: after its tensor, numbered where that has several here."""
    seen: dict[str, int] = {}
    keys = []
    for part in parts:
        name = part.placement.name
        number = seen[name] = seen.get(name, -1) + 1
        keys.append(f"{name}.{number}" if number else name)
    return keys


def _head(runs: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Return a safetensors header, padded with blanks to whole pages; nothing for no runs."""
    if not runs:
        return torch.empty(0, dtype=torch.uint8)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, run in runs:
        end = position + run.numel() * ELEMENT_BYTES
        entries[key] = {"dtype": "F32", "shape": [run.numel()], "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
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
