"""Checkpoints on the disks of nodes: find the parts, and merge them into one checkpoint.

A part is what the ranks of one node have saved. It lies on the node's own disk and, with
`checkpoint.partner`, on the disk of the next node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from frontier_llm.checkpoint.chunk_pool import host_buffer
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.folders import COPY, NODE, step_folders
from frontier_llm.checkpoint.manifest import FilePart, Manifest, StoredRange, Tensor
from frontier_llm.checkpoint.range_reader import RangeReader, chunk_ranges
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.checkpoint.stored_ranges import Shape
from frontier_llm.checkpoint.write_plan import PAGE_BYTES
from frontier_llm.errors import CheckpointError


@dataclass(frozen=True, order=True)
class NodePart:
    """A committed part of a checkpoint on a disk."""

    node: int
    is_copy: bool
    """Whether it lies on the next node's disk."""
    folder: str
    step: int
    start: str
    """Id of the start of the run that saved it. Parts of different starts do not fit together."""
    moments: str = ""
    """Format of reduced moments; empty: all states are fp32."""


def find_parts(root: Path) -> tuple[list[NodePart], dict[int, str]]:
    """Return the undamaged parts on this node's disk, and by step what is wrong with others."""
    parts, damage = list[NodePart](), dict[int, str]()
    for parent in sorted(root.iterdir()) if root.is_dir() else ():
        prefix, _, number = parent.name.rpartition("_")
        if f"{prefix}_" not in (NODE, COPY) or not number.isdigit():
            continue
        for step, suffix, path in step_folders(parent):
            if suffix:
                continue
            try:
                manifest = Checkpoint.open(path).manifest
            except CheckpointError as error:
                damage[step] = error.reason
                continue
            is_copy, start = f"{prefix}_" == COPY, str(manifest.meta.get("start"))
            moments = manifest.moments or ""
            parts.append(NodePart(int(number), is_copy, str(path), step, start, moments))
    return parts, damage


def merge(parts: Mapping[int, Manifest]) -> tuple[Manifest, dict[str, int]]:
    """Merge the manifests of nodes, and leave out files whose elements other files store, too.

    Of two files with the same name, that of the first node is used. The last of the parts has the
    newest counters. Returns the manifest, and for each of its files the number of its node.
    """
    seen: set[tuple[str, Shape, Shape, int, int]] = set()
    tensors: dict[str, list[StoredRange]] = {}
    shapes: dict[str, Shape] = {}
    node_of: dict[str, int] = {}
    for node, manifest in sorted(parts.items()):
        for name, tensor in manifest.tensors.items():
            shapes[name] = tensor.shape
            for stored in tensor.stored_ranges:
                key = (name, stored.start, stored.shape, stored.first, stored.count)
                if key not in seen and node_of.get(stored.file, node) == node:
                    seen.add(key)
                    tensors.setdefault(name, []).append(stored)
                    node_of[stored.file] = node
    first, last = parts[min(parts)], parts[max(parts)]
    merged = Manifest(
        step=first.step,
        world=sum(manifest.world for manifest in parts.values()),
        repeats=True,
        chunk_bytes=first.chunk_bytes,
        files={name: parts[node].files[name] for name, node in node_of.items()},
        tensors={
            name: Tensor(shape=shapes[name], stored_ranges=tuple(ranges))
            for name, ranges in tensors.items()
        },
        moments=first.moments,
        meta=last.meta,
    )
    return merged, node_of


def first_incomplete(manifest: Manifest, model: Mapping[str, Shape]) -> str | None:
    """Return the name of a tensor of which elements are not stored; None if there is none.

    Boxes (blocks of a tensor that one tensor-parallel rank holds) must be equal or not overlap.
    """
    for name, shape in model.items():
        tensor = manifest.tensors.get(name)
        if tensor is None or sum(map(_length, tensor.ranges().values())) != prod(shape):
            return name
    return None


def copy_file(checkpoint: Checkpoint, name: str, target: Path) -> None:
    """Copy and sync a file of a checkpoint, and compare each chunk with its digest on the way.

    Chunks that an interrupted copy has left in the target are not written again.
    """
    file, chunks = checkpoint.manifest.files[name], chunk_ranges(checkpoint, name)
    largest = max((chunk.pages_bytes for chunk in chunks), default=PAGE_BYTES)
    buffer = host_buffer(largest)
    with (
        RangeReader(checkpoint, verify=True) as reader,
        RankFile(target, file.size, continues=True) as copy,
    ):
        for range_ in chunks:
            content = reader.read(range_, buffer)
            copy.write(buffer, content.numel())
        written: FilePart = copy.finish()
    if written.chunks != file.chunks:
        raise CheckpointError(f"{target} is damaged: it differs from {checkpoint.folder / name}")


def _length(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the number of elements in a union of ranges [first, stop)."""
    length = end = 0
    for first, stop in sorted(ranges):
        length += max(0, stop - max(first, end))
        end = max(end, stop)
    return length
