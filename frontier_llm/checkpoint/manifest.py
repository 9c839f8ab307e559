"""The format on disk: which files a checkpoint has, and where each element is stored.

    step_00000012/rank_00003.safetensors   elements of tensors, fp32
    step_00000012/manifest.json            says which elements of which tensor each file stores

A global tensor is a whole tensor of the model, before tensor parallelism splits it. A box is a
rectangular block of a global tensor. Files store contiguous ranges of flattened boxes. The manifest
describes each range by its position in the global tensor, so it does not depend on the parallel
layout. The manifest begins with the digest of its own remaining bytes.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from frontier_llm.checkpoint.folders import MANIFEST
from frontier_llm.checkpoint.stored_ranges import Shape
from frontier_llm.errors import CheckpointError, damaged_checkpoint
from frontier_llm.geometry.state_memory import MOMENT_BLOCK_ELEMENTS, MOMENT_BLOCK_WORDS
from frontier_llm.units import GIB

Moments = Literal["bf16", "int8"]
"""Format of reduced moments (reduced_moments.py)."""
FORMAT = 1
ELEMENT_BYTES = 4
"""Size of an element in bytes: all states are fp32."""
_HEAD = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})",(?="format":(\d{1,9}),)')
"""The beginning of a manifest: its digest and its format."""
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[^\p{Cc}\p{Cf}/]+$", max_length=999)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
Index = Annotated[tuple[Bytes, ...], Field(max_length=8)]
"""One number per dim."""
Extent = Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 60)], ...], Field(max_length=8)]
"""A shape without empty dims."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    def to_json(self) -> str:
        """Return JSON with the keys of the format, which are the aliases of the fields."""
        return self.model_dump_json(by_alias=True)


class StoredRange(_Model):
    """A contiguous range of the flattened box of a global tensor, stored in one file."""

    file: FileName
    """Name of the file, in the manifest's folder."""
    start: Index
    """Index of the box's first element in the tensor, one number per dim."""
    shape: Extent
    first: Bytes
    """First element of the range in the flattened box."""
    count: Annotated[int, Field(ge=1, le=1 << 60)]
    keys: dict[Name, Annotated[str, StringConstraints(pattern=r"^[^\p{Cc}\p{Cf}]+$")]]
    """Key of the range in the safetensors file, by state, such as `master`."""
    bytes_at: dict[str, Annotated[Bytes, Field(multiple_of=ELEMENT_BYTES)]]
    """Offset of the range in the file in bytes, by state."""


class Tensor(_Model):
    """A global tensor, and where its elements are stored."""

    shape: Extent
    """Shape of the whole tensor, without padding."""
    stored_ranges: tuple[StoredRange, ...] = Field(alias="pieces", min_length=1)
    """Ranges that together store every element. The JSON key `pieces` is part of the format: a new
    key would make existing checkpoints unreadable."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the stored states, in the order of the files."""
        return tuple(dict.fromkeys(name for range_ in self.stored_ranges for name in range_.keys))

    def ranges(self) -> dict[tuple[Shape, Shape], list[tuple[int, int]]]:
        """Return the stored ranges [first, stop) of each box, given by its start and shape."""
        found: dict[tuple[Shape, Shape], list[tuple[int, int]]] = {}
        for r in self.stored_ranges:
            found.setdefault((r.start, r.shape), []).append((r.first, r.first + r.count))
        return found


class File(_Model):
    """A file of a checkpoint."""

    size: Bytes
    chunks: tuple[Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")], ...]
    """xxh3_128 digest of each chunk, so that a reader can verify single chunks."""


class FilePart(File):
    """The part of a file that one rank wrote: whole chunks, or the end of the file."""

    offset_bytes: Bytes


class RankRecord(_Model):
    """Description of what one rank has written; rank 0 merges the records into the manifest."""

    files: dict[FileName, FilePart]
    tensors: dict[Name, Tensor]


class Manifest(_Model):
    """Content of a checkpoint."""

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0, le=10**12)]
    world: Annotated[int, Field(ge=1, le=10**8)]
    repeats: bool = False
    """Whether elements may be stored more than once. True for checkpoints on node-local disks,
    each of which holds everything that the ranks of its node need."""
    chunk_bytes: Annotated[int, Field(gt=0, le=GIB, multiple_of=4096)]
    """Size of a chunk, the part of a file that has one digest, in bytes."""
    moments: Moments | None = None
    """Format of the moments, if they are reduced; None: all states are fp32."""
    files: dict[FileName, File]
    tensors: dict[Name, Tensor]
    meta: dict[Name, Any]
    """Plain JSON that the caller stores with the checkpoint: configuration and counters."""

    @classmethod
    def merged(
        cls,
        step: int,
        chunk_bytes: int,
        records: Sequence[RankRecord],
        meta: dict[str, Any],
        *,
        repeats: bool = False,
        moments: Moments | None = None,
    ) -> "Manifest":
        """Merge the records of the ranks that write into one folder.

        A CheckpointError is raised if the parts of a file leave a gap or overlap.
        """
        parts: dict[str, list[FilePart]] = {}
        stored: dict[str, list[StoredRange]] = {}
        shapes: dict[str, Shape] = {}
        for record in records:
            for name, part in record.files.items():
                parts.setdefault(name, []).append(part)
            for name, tensor in record.tensors.items():
                shapes[name] = tensor.shape
                stored.setdefault(name, []).extend(tensor.stored_ranges)
        tensors = {
            name: Tensor(shape=shapes[name], stored_ranges=tuple(ranges))
            for name, ranges in stored.items()
        }
        return cls(
            step=step,
            world=len(records),
            repeats=repeats,
            chunk_bytes=chunk_bytes,
            moments=moments,
            files={name: _join_parts(name, found) for name, found in parts.items()},
            tensors=tensors,
            meta=meta,
        )

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors of the model. Other tensors are states of the optimizer only."""
        return {name: tensor for name, tensor in self.tensors.items() if "master" in tensor.states}

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON whose first key is the digest of all bytes after it."""
        # without the key `moments`, versions that do not know it can read the checkpoint
        exclude = {"moments"} if self.moments is None else None
        rest = self.model_dump_json(by_alias=True, exclude=exclude).encode()[1:]
        return b'{"xxh3_128":"%s",%s' % (xxhash.xxh3_128_hexdigest(rest).encode(), rest)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read the manifest in a checkpoint's folder; errors are those of `parse`."""
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: bytes, name: str) -> "Manifest":
        """Parse the output of `to_bytes`, and check every value in it.

        A CheckpointError is raised if the content is damaged or in another format, or its values
        contradict each other.
        """
        head = _HEAD.match(text)
        if head is None:
            raise damaged_checkpoint(f"{name} is damaged: it does not begin as a manifest does")
        if int(head[2]) != FORMAT:
            raise CheckpointError(
                f"{name} is of format {int(head[2])}, this version of frontier_llm reads format "
                f"{FORMAT}: read it with the version that wrote it"
            )
        if head[1].decode() != xxhash.xxh3_128_hexdigest(text[head.end() :]):
            raise damaged_checkpoint(f"{name} is damaged: its digest does not match its content")
        try:
            manifest = cls.model_validate_json(b"{" + text[head.end() :])
        except ValidationError as error:
            first = error.errors()[0]
            where, got = ".".join(map(str, first["loc"])), repr(first["input"])[:99]
            raise damaged_checkpoint(
                f"{name} is damaged at {where}: {first['msg']}, it is {got}"
            ) from None
        for problem in problems(manifest):
            raise damaged_checkpoint(f"{name} is damaged at {problem}")
        return manifest


@dataclass(frozen=True)
class SplitManifest:
    """A checked manifest as texts, of which each rank parses only what it reads.

    The manifest of 3,072 ranks has 32 MB, and takes 200 MB as objects.
    """

    head: str
    files: dict[str, str]
    tensors: dict[str, str]
    weights: frozenset[str]
    """Names of the tensors of the model."""

    @classmethod
    def of(cls, manifest: Manifest) -> "SplitManifest":
        """Split a manifest, on the rank that has checked it."""
        return cls(
            manifest.model_copy(update={"files": {}, "tensors": {}}).to_json(),
            {name: file.to_json() for name, file in manifest.files.items()},
            {name: tensor.to_json() for name, tensor in manifest.tensors.items()},
            frozenset(manifest.weights),
        )

    def part(self, names: Iterable[str]) -> Manifest:
        """Return a manifest of some tensors, as far as they exist, and of the files with them."""
        tensors = {
            name: Tensor.model_validate_json(self.tensors[name])
            for name in dict.fromkeys(names)
            if name in self.tensors
        }
        used = {stored.file for tensor in tensors.values() for stored in tensor.stored_ranges}
        files = {name: File.model_validate_json(self.files[name]) for name in sorted(used)}
        head = Manifest.model_validate_json(self.head)
        return head.model_copy(update={"files": files, "tensors": tensors})


def _join_parts(name: str, parts: Sequence[FilePart]) -> File:
    ordered = sorted(parts, key=attrgetter("offset_bytes"))
    end = 0
    for part in ordered:
        if part.offset_bytes != end:
            raise CheckpointError(f"{name}: byte {end} was written by no rank or by several")
        end += part.size
    return File(size=end, chunks=tuple(chunk for part in ordered for chunk in part.chunks))


def problems(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong: the entry, a colon, and the reason."""
    occupied: dict[str, list[tuple[int, int, str]]] = {}
    for name, file in manifest.files.items():
        chunks = -(-file.size // manifest.chunk_bytes)
        if len(file.chunks) != chunks:
            yield f"files.{name}.chunks: it has {len(file.chunks)} digests for {chunks} chunks"
        # eight bytes give the length of a file's header
        occupied[name] = [(0, 8, "the header"), (file.size, file.size, f"files.{name}.size")]
    for name, tensor in manifest.tensors.items():
        for number, stored in enumerate(tensor.stored_ranges):
            where = f"tensors.{name}.pieces.{number}"
            if problem := _range_problem(stored, tensor, occupied.keys()):
                yield f"{where}.{problem}"
                return
            occupied[stored.file] += (
                (begin, begin + stored_bytes(manifest, stored, state), f"{where}.bytes_at.{state}")
                for state, begin in stored.bytes_at.items()
            )
        if not manifest.repeats and not _is_stored_once(tensor):
            yield f"tensors.{name}.pieces: they do not store every element exactly once"
    yield from (
        f"{second}: {first} takes byte {begin} of {name}, too"
        for name, ranges in occupied.items()
        for (_, end, first), (begin, _, second) in pairwise(sorted(ranges))
        if begin < end
    )


def stored_bytes(manifest: Manifest, stored: StoredRange, state: str) -> int:
    """Return the size of a state of a stored range in bytes."""
    if manifest.moments is None or state not in ("exp_avg", "exp_avg_sq"):
        return 4 * stored.count
    return 4 * -(-stored.count // MOMENT_BLOCK_ELEMENTS) * MOMENT_BLOCK_WORDS[manifest.moments]


def _range_problem(stored: StoredRange, tensor: Tensor, files: Container[str]) -> str:
    """Return the field of a range that is wrong, and why; empty if none is."""
    if stored.file not in files:
        return f"file: {stored.file} is not one of the checkpoint's files"
    states = tensor.stored_ranges[0].keys.keys()
    if not states or not states == stored.keys.keys() == stored.bytes_at.keys():
        return "keys: not the same states as in bytes_at and in other ranges"
    if not len(stored.start) == len(stored.shape) == len(tensor.shape):
        return "shape: not as many dims as the tensor"
    for start, size, whole in zip(stored.start, stored.shape, tensor.shape, strict=True):
        if start + size > whole:
            return f"start: the box ends outside of the tensor, at {start + size} of {whole}"
    if stored.first + stored.count > prod(stored.shape):
        return "count: the range ends outside of its box"
    return ""


def _is_stored_once(tensor: Tensor) -> bool:
    """Return whether the ranges of each box cover it once, and the boxes cover the tensor once.

    A set of boxes covers a larger box once if and only if their corners, counted with the sign of
    the corner, add up to those of the larger box. This takes linear time.
    """
    boxes, corners = tensor.ranges(), Counter[tuple[int, ...]]()
    whole = (0,) * len(tensor.shape), tensor.shape
    for (start, shape), sign in [*((box, 1) for box in boxes), (whole, -1)]:
        edges = [((a, 1), (a + size, -1)) for a, size in zip(start, shape, strict=True)]
        for corner in product(*edges):
            corners[tuple(at for at, _ in corner)] += sign * prod(s for _, s in corner)
    return not any(corners.values()) and all(
        end == begin
        for (_, shape), ranges in boxes.items()
        for (_, end), (begin, _) in pairwise(sorted([(0, 0), *ranges, (prod(shape),) * 2]))
    )
