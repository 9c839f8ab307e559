"""Describe a prepared corpus and check that its files are complete.

A prepared corpus is a folder with these files:

- `manifest.json` (the class `Manifest`), and the files of the tokenizer (tokenizer_source.py).
- `files.jsonl`, with one line per file of the source that the corpus was prepared from.
- `digests.json` with digests of blocks of the following files, and `verified.json`
  (corpus_check.py).
- For each split (training and validation) a `.bin` file with all tokens and an `.idx` file with the
  positions of the documents, both in Megatron's indexed format, and a `.places` file with the
  position of each document in its source file.

The folder is renamed to its final name when everything in it is complete.
"""

import hashlib
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from frontier_llm.data.corpus_account import Account
from frontier_llm.errors import DataError

FORMAT = 3
"""Version of the format of prepared corpora."""
MANIFEST_FILE = "manifest.json"
FILES_FILE = "files.jsonl"
TYPE_CODES = {"uint16": 8, "int32": 4}
"""Code of each type of token ids in an .idx file. They are those of megatron-core's DType, whose
module would import torch."""
IDX_HEADER = struct.Struct("<9sQBQQ")
"""Layout of the header of an `.idx` file (see `idx_header`)."""


_COUNTS_OF_FORMAT_2 = (
    "files", "skipped_files", "empty_documents", "broken_documents", "repeated_documents",
    "examples",
)  # fmt: skip


class Split(BaseModel):
    """Sizes of one split, the documents for training or the documents for validation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int
    tokens: int
    """Number of tokens, including end-of-document tokens."""
    text_bytes: int
    """Size of the text in UTF-8 in bytes."""
    bin_sha256: str
    """SHA-256 of the token file."""

    @property
    def text_bytes_per_token(self) -> float:
        """Mean length in UTF-8 of the tokens that do not end a document; 0 if there are none."""
        return self.text_bytes / max(1, self.tokens - self.documents)


class Manifest(BaseModel):
    """Description of a prepared corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2, 3]
    name: str
    kind: str
    source: str
    """Path of the source file or folder at the time of preparation."""
    source_sha256: str
    """Digest of the names and contents of the source files."""
    account: Account | None
    """What was read and what was left out; None in a corpus of format 2."""
    pieces: int
    """Size of the vocabulary, including special tokens. On a small corpus it is less than
    data.vocabulary. (The key cannot be renamed, because it is stored in prepared corpora.)"""
    eod: int
    """Token id that ends a document."""
    dtype: Literal["uint16", "int32"]
    """Integer type in which a token is stored."""
    tokenizer_sha256: str
    """Digest of the files of the tokenizer (`digest_tokenizer`)."""
    train: Split
    validation: Split

    @model_validator(mode="before")
    @classmethod
    def _without_account(cls, values: Any) -> Any:
        """Drop the counts of format 2, which have no bytes and do not add up."""
        if isinstance(values, dict) and values.get("format") == 2:
            values = {key: values[key] for key in values if key not in _COUNTS_OF_FORMAT_2}
            values["account"] = None
        return values

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a manifest.

        Raises:
            DataError: the file is absent, damaged or in another format.
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
        """Digest of the tokens and the tokenizer. It does not depend on any path."""
        tokens = (self.dtype, self.train.bin_sha256, self.validation.bin_sha256)
        return hashlib.sha256("\0".join((self.tokenizer_sha256, *tokens)).encode()).hexdigest()

    @property
    def token_type(self) -> type[np.uint16] | type[np.int32]:
        """Integer type in which a token is stored, as a NumPy type."""
        return np.uint16 if self.dtype == "uint16" else np.int32

    def check_files(self, folder: Path) -> None:
        """Check the sizes of all files of tokens and the headers of the index files.

        Raises:
            DataError: a file is missing, has the wrong size or belongs to another corpus.
        """
        for name, split in (("train", self.train), ("validation", self.validation)):
            self.check_split(folder / name, split)

    def check_split(self, prefix: Path, split: Split) -> None:
        """Check the files of one split: `prefix`.bin, `prefix`.idx and `prefix`.places."""
        item_bytes = np.dtype(self.token_type).itemsize
        # per document a length (int32) and a start (int64); then the numbers 0 to `documents`
        # (int64), because Megatron's documents can consist of several sequences, and ours do not
        index_bytes = IDX_HEADER.size + 12 * split.documents + 8 * (split.documents + 1)
        _check_size(prefix.with_suffix(".bin"), split.tokens * item_bytes)
        _check_size(prefix.with_suffix(".idx"), index_bytes)
        _check_size(prefix.with_suffix(".places"), 8 * split.documents)
        header = idx_header(self.token_type, split.documents)
        with prefix.with_suffix(".idx").open("rb") as stream:
            if stream.read(len(header)) != header:
                raise _damaged(prefix.parent, f"{prefix.name}.idx does not match the manifest")


def idx_header(dtype: type[np.generic], documents: int) -> bytes:
    """Return the header of an `.idx` file.

    Its fields are a magic string, the version of the format, the code of the token type, the number
    of sequences, and the length of the index of documents. In a prepared corpus each document is
    one sequence.
    """
    code = TYPE_CODES[np.dtype(dtype).name]
    return IDX_HEADER.pack(b"MMIDIDX\0\0", 1, code, documents, documents + 1)


def _check_size(path: Path, wanted: int) -> None:
    """Check that a file exists and has `wanted` bytes."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _damaged(path.parent, f"{path.name}: {error.strerror or error}") from error
    if size != wanted:
        raise _damaged(path.parent, f"{path.name} has {size} bytes and should have {wanted}")


def _damaged(folder: Path, reason: str) -> DataError:
    return DataError(
        f"the prepared corpus {folder} is damaged: {reason}\n"
        "  do: delete this folder; it is prepared again at the next start"
    )
