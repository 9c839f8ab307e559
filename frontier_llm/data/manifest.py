"""What a prepared corpus holds, and how to tell that it is all there.

A corpus is a folder: `manifest.json`, `tokenizer.model`, and for each split a `.bin` (all its
tokens, one after another) and an `.idx` (where its documents are), in megatron's format, and a
`.places` (where in its file each document stood); `files.jsonl` has a line a file. The folder
appears by one rename when everything in it is complete.
"""

import hashlib
import struct
from pathlib import Path
from typing import Literal

import numpy as np
from megatron.core.datasets.indexed_dataset import DType
from pydantic import BaseModel, ConfigDict, ValidationError

from frontier_llm.errors import DataError

FORMAT = 2
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.model"
FILES_FILE = "files.jsonl"
IDX_HEADER = struct.Struct("<9sQBQQ")


class Split(BaseModel):
    """The documents of one split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int
    tokens: int
    """End-of-document tokens included."""
    text_bytes: int
    """Of the text in UTF-8."""
    bin_sha256: str
    """Digest of the token file."""


class Manifest(BaseModel):
    """What a prepared corpus holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2]
    name: str
    kind: str
    source: str
    """The file or folder it was made from, as it was called then."""
    source_sha256: str
    """Digest of the sources' names and contents."""
    files: int
    skipped_files: int
    """Files of the source that hold no document."""
    empty_documents: int
    """Texts of no characters, left out."""
    broken_documents: int
    """What is no text where a text should be, left out (data.broken=skip)."""
    repeated_documents: int
    """Documents that were there before, left out (data.unique=true)."""
    examples: tuple[str, ...]
    """The first files and documents that were left out, and why."""
    pieces: int
    """Size of the vocabulary, specials included; fewer than asked for on a small corpus."""
    eod: int
    """The token that ends a document."""
    dtype: Literal["uint16", "int32"]
    """How a token is stored."""
    tokenizer_sha256: str
    train: Split
    validation: Split

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a manifest.

        Raises:
            DataError: there is none, or it is of another format.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise _damaged(path.parent, f"{path.name}: {error.strerror or error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise _damaged(path.parent, f"{path.name} {where}: {first['msg']}") from error

    @property
    def digest(self) -> str:
        """Digest of all that decides a sample: tokens and their meaning, not where they lie."""
        parts = (self.tokenizer_sha256, self.dtype, self.train.bin_sha256)
        return hashlib.sha256("\0".join((*parts, self.validation.bin_sha256)).encode()).hexdigest()

    @property
    def token_type(self) -> type[np.uint16] | type[np.int32]:
        """The stored type of a token."""
        return np.uint16 if self.dtype == "uint16" else np.int32

    def check_files(self, folder: Path) -> None:
        """Compare every file's size, and the index files' headers, with what they must be.

        Raises:
            DataError: a file is missing, short, long or of another corpus.
        """
        _check_size(folder / TOKENIZER_FILE, None)
        for name, split in (("train", self.train), ("validation", self.validation)):
            self.check_split(folder / name, split)

    def check_split(self, prefix: Path, split: Split) -> None:
        """Do so for the two files `prefix`.bin and `prefix`.idx.

        Raises:
            DataError: one is missing, short, long or of another corpus.
        """
        header = idx_header(self.token_type, split.documents)
        item_bytes = np.dtype(self.token_type).itemsize
        # a length (int32) and a start (int64) a document, and where each ends (int64, from 0 on)
        index_bytes = len(header) + 12 * split.documents + 8 * (split.documents + 1)
        _check_size(prefix.with_suffix(".bin"), split.tokens * item_bytes)
        _check_size(prefix.with_suffix(".idx"), index_bytes)
        _check_size(prefix.with_suffix(".places"), 8 * split.documents)
        with prefix.with_suffix(".idx").open("rb") as stream:
            if stream.read(len(header)) != header:
                raise _damaged(prefix.parent, f"{prefix.name}.idx does not fit its manifest")


def idx_header(dtype: type[np.generic], documents: int) -> bytes:
    """Return how an .idx begins: magic, version, type of a token, sequences, document ends."""
    code = DType.code_from_dtype(dtype)
    return IDX_HEADER.pack(b"MMIDIDX\0\0", 1, code, documents, documents + 1)


def _check_size(path: Path, wanted: int | None) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _damaged(path.parent, f"{path.name}: {error.strerror or error}") from error
    if wanted is not None and size != wanted:
        raise _damaged(path.parent, f"{path.name} has {size} bytes and should have {wanted}")


def _damaged(folder: Path, what: str) -> DataError:
    return DataError(
        f"the prepared corpus {folder} is damaged: {what}\n"
        "  do: delete this folder; it is prepared again at the next start"
    )
