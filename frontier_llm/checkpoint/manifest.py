"""The format on disk: what a checkpoint's folder holds, and where each element is.

    step_00000012/rank_00003.safetensors   runs of flattened boxes of global tensors, fp32
    step_00000012/manifest.json            places each run in its global tensor

The manifest begins with the digest of all that follows in it. No layout is on disk: a piece knows
a box of a global tensor and a run of that box's elements.
"""

import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from frontier_llm.checkpoint.names import MANIFEST
from frontier_llm.checkpoint.pieces import Shape
from frontier_llm.errors import CheckpointError
from frontier_llm.units import MIB

FORMAT = 1
STATES = ("master", "exp_avg", "exp_avg_sq")
ELEMENT_BYTES = 4
CHUNK_BYTES = 16 * MIB
"""What is written, digested and verified at once."""
_HEAD = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})",(?="format":(\d+),)')


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Piece(_Model):
    """A run of elements of a box of a global tensor, in one file."""

    file: str
    """Name of the file, in the manifest's folder."""
    start: Shape
    """First index of the box in the tensor, one number a dim."""
    shape: Shape
    """Extent of the box."""
    first: int
    """First element of the run in the flattened box."""
    count: int
    """Elements of the run."""
    keys: dict[str, str]
    """What the run is called in the file, by state: `master`, `exp_avg`, `exp_avg_sq`."""
    bytes_at: dict[str, int]
    """Where it begins in the file, by state."""


class Tensor(_Model):
    """A tensor of the model."""

    shape: Shape
    """Of the whole tensor, without padding."""
    pieces: tuple[Piece, ...]
    """In which it is stored: each element once."""


class File(_Model):
    """A file of a checkpoint."""

    size: int
    """Bytes."""
    chunks: tuple[str, ...]
    """Digest of each `chunk_bytes` of it, so that a reader can verify what it reads."""


class FilePart(File):
    """What one rank wrote of a file: whole chunks, and what remains at the end of the file."""

    at: int
    """First byte in the file."""


class RankRecord(_Model):
    """What one rank has written: what rank 0 makes the manifest of."""

    files: dict[str, FilePart]
    tensors: dict[str, Tensor]


class Manifest(_Model):
    """What a checkpoint holds."""

    format: Literal[1] = 1
    step: int
    """Optimizer steps done."""
    world: int
    """Ranks that wrote it."""
    repeats: bool = False
    """Whether elements may be stored more than once: in a node's own checkpoint, which holds all
    that its ranks need."""
    chunk_bytes: int
    """Bytes of a file that share a digest."""
    files: dict[str, File]
    """By name."""
    tensors: dict[str, Tensor]
    """By global name."""
    meta: dict[str, Any]
    """What the caller gave: plain JSON."""

    @classmethod
    def merged(
        cls,
        step: int,
        chunk_bytes: int,
        records: Sequence[RankRecord],
        meta: dict[str, Any],
        *,
        repeats: bool = False,
    ) -> "Manifest":
        """Put together what ranks have written.

        Raises:
            CheckpointError: they left something of a file out.
        """
        parts: dict[str, list[FilePart]] = {}
        pieces: dict[str, list[Piece]] = {}
        shapes: dict[str, Shape] = {}
        for record in records:
            for name, part in record.files.items():
                parts.setdefault(name, []).append(part)
            for name, tensor in record.tensors.items():
                shapes[name] = tensor.shape
                pieces.setdefault(name, []).extend(tensor.pieces)
        tensors = {
            name: Tensor(shape=shapes[name], pieces=tuple(found)) for name, found in pieces.items()
        }
        return cls(
            step=step,
            world=len(records),
            repeats=repeats,
            chunk_bytes=chunk_bytes,
            files={name: _joined(name, found) for name, found in parts.items()},
            tensors=tensors,
            meta=meta,
        )

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """Write as JSON, headed by the digest of the rest."""
        rest = self.model_dump_json().encode()[1:]
        return b'{"xxh3_128":"%s",%s' % (xxhash.xxh3_128_hexdigest(rest).encode(), rest)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read the manifest of a checkpoint's folder.

        Raises:
            CheckpointError: it cannot be read, is damaged, or is of another format.
        """
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: bytes, name: str) -> "Manifest":
        """Read what `to_bytes` wrote.

        Args:
            text: the content.
            name: of the file, for messages.

        Raises:
            CheckpointError: it is damaged, or of another format.
        """
        head = _HEAD.match(text)
        if head is None:
            raise CheckpointError(f"{name} is damaged: it does not begin as a manifest does")
        if int(head[2]) != FORMAT:
            raise CheckpointError(
                f"{name} is of format {int(head[2])}, this version of frontier_llm reads format "
                f"{FORMAT}: read it with the version that wrote it"
            )
        if head[1].decode() != xxhash.xxh3_128_hexdigest(text[head.end() :]):
            raise CheckpointError(f"{name} is damaged: its digest does not fit its content")
        try:
            return cls.model_validate_json(b"{" + text[head.end() :])
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{name} is damaged at {where}: {first['msg']}") from None


def _joined(name: str, parts: Sequence[FilePart]) -> File:
    """Put a file together from what ranks wrote of it.

    Raises:
        CheckpointError: they leave something out, or overlap.
    """
    ordered = sorted(parts, key=attrgetter("at"))
    end = 0
    for part in ordered:
        if part.at != end:
            raise CheckpointError(f"{name}: nobody, or more than one rank, wrote byte {end}")
        end += part.size
    return File(size=end, chunks=tuple(chunk for part in ordered for chunk in part.chunks))
