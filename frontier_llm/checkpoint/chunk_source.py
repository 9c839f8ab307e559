"""What `save` needs to know of a rank's file and its content."""

from collections.abc import Iterator, Sized
from typing import Protocol

import torch

from frontier_llm.checkpoint.manifest import FilePart, RankRecord


class ChunkSource(Protocol):
    """The content of a rank's file: a snapshot of states, or a stored or received copy."""

    def chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the chunks of the file in order: (buffer, size of the chunk in bytes).

        The buffer is [chunk_bytes] uint8 on the host, page-aligned, valid until the next chunk.
        """

    def close(self) -> None:
        """Free what the source occupies."""


class FilePlan(Protocol):
    """The layout of a rank's file."""

    @property
    def name(self) -> str:
        """Name of the file."""

    @property
    def offset_bytes(self) -> int:
        """Offset of this rank's part in the file."""

    @property
    def size(self) -> int:
        """Size of this rank's part in bytes."""

    @property
    def total(self) -> int | None:
        """Size in bytes of a file that ranks share; None if this rank writes the file alone."""

    @property
    def chunk_bytes(self) -> int:
        """Size of every chunk but the last, in bytes."""

    @property
    def chunks(self) -> Sized:
        """One item per chunk."""

    def record(self, file: FilePart | None) -> RankRecord:
        """Return the description of what was written, for the manifest."""
