"""Describe a prepared corpus, account for its source, and check that its files are complete.

A prepared corpus is a folder with these files:

- `manifest.json` (the class `Manifest`), and the files of the tokenizer (tokenizer_source.py).
- `files.jsonl`, with one line per file of the source that the corpus was prepared from.
- `digests.json` with a digest per block of each of the following files, by which bytes are found
  that have changed. `verified.json` lists the files that were found whole, so that later starts of
  a run skip them.
- For each split (training and validation) a `.bin` file with all tokens and an `.idx` file with the
  positions of the documents, both in Megatron's indexed format, and a `.places` file with the
  position of each document in its source file.

The folder is renamed to its final name when everything in it is complete.

An account has every file, byte and document of the source: the files that were found are those that
were read and those that were left out, and the documents that were found are those of both splits
and those that were left out. `Account.check` verifies both.
"""

import hashlib
import json
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from frontier_llm.atomic_files import replace_text
from frontier_llm.errors import DataError
from frontier_llm.units import MIB, counted

MAX_EXAMPLES = 3
HIDDEN = "hidden"
REPEATED = "other paths to files that are read"
BROKEN = "unreadable"
DISAGREES = "whose name and content disagree"
BESIDE = "documentation and other files beside the data"
OTHER_FORMAT = "of another format"
EMPTY = "empty"
OWN = "runs, checkpoints and prepared corpora, each folder counted as one"
FORMAT = 3
MANIFEST_FILE = "manifest.json"
FILES_FILE = "files.jsonl"
TYPE_CODES = {"uint16": 8, "int32": 4}
"""Code of each type of token ids in an .idx file. They are those of megatron-core's DType, whose
module would import torch."""
IDX_HEADER = struct.Struct("<9sQBQQ")
"""Layout of the header of an `.idx` file (see `idx_header`)."""
DIGESTS_FILE, NOTE_FILE = "digests.json", "verified.json"
BLOCK_BYTES = 64 * MIB
"""Size of a block in bytes. It is part of the format of digests.json."""
SPLITS = ("train", "validation")
_KINDS = ("bin", "idx", "places")
_FILES = [f"{split}.{kind}" for split in SPLITS for kind in _KINDS]
VALIDATION_FILES = _FILES[len(_KINDS) :]
_DIGESTS, _FINGERPRINTS = TypeAdapter(dict[str, list[str]]), TypeAdapter(dict[str, list[int]])
OnRead = Callable[[int], None]
"""A function that is called with the number of bytes after each read."""


def printable(name: str) -> str:
    """Return the name of a file with escapes for what is no text, such as bytes that no UTF-8 has.

    Linux permits all bytes but NUL and slashes in names.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


BYTES_SHARE = 0.2
"""Share of the text in single bytes above which a run warns. Texts in the language of a tokenizer
have few rare characters; of a text in another script, most characters are missing."""

MARKS_SHARE = 0.1
"""Number of END_MARKS per document above which a run warns of them."""
CHANGED_SHARE = 0.01
"""Share of the characters that the tokenizer drops or replaces, above which a run warns."""


class Tally(BaseModel):
    """Number and size of some files, with the names of the first."""

    model_config = ConfigDict(extra="forbid")

    files: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    examples: list[str] = []

    def add(self, name: str, size: int) -> None:
        """Count a file of `size` bytes."""
        self.files += 1
        self.bytes += size
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(printable(name))

    def add_all(self, other: "Tally") -> None:
        """Count all files of another tally."""
        self.files += other.files
        self.bytes += other.bytes
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]


def most_validation(percent: float) -> float:
    """Return the largest share of a text that may be for validation where `percent` should be."""
    return max(0.2, 2 * percent / 100)


class TextCounts(BaseModel):
    """Counts of the characters of documents."""

    model_config = ConfigDict(extra="forbid")

    characters: int = Field(default=0, ge=0)
    """Number of characters of all documents, copies of earlier documents included."""
    lost: int = Field(default=0, ge=0)
    """Number of characters, except white space, that no token stands for."""
    unknown: int = Field(default=0, ge=0)
    unknown_tokens: int = Field(default=0, ge=0)
    changed: int = Field(default=0, ge=0)
    """Number of other characters that the text of the tokens lacks, because the tokenizer
    normalises: white space that it drops, or letters that it replaces."""
    changed_by: Counter[str] = Counter()
    """What the text of the tokens lacks, by kind: line breaks, blanks, capital letters, and other
    characters. Empty in corpora of versions that did not count it."""
    replaced: int = Field(default=0, ge=0)
    """Number of halves of surrogate pairs, each of which became U+FFFD."""
    bytes: int = Field(default=0, ge=0)
    """Size of all documents in UTF-8; 0 in corpora of versions that did not count it."""
    end_marks: int = Field(default=0, ge=0)
    """Number of END_MARKS (source_format.py) in documents, which are encoded as ordinary text."""
    ends: int = Field(default=0, ge=0)
    """Number of tokens of their text that are the token which ends a document."""
    byte_tokens: int = Field(default=0, ge=0)
    """Number of tokens that stand for a single byte of a character with several bytes."""

    @property
    def byte_share(self) -> float:
        """Share of the text in bytes that have tokens of their own."""
        return self.byte_tokens / max(1, self.bytes)

    @property
    def changed_share(self) -> str | None:
        """Share of the characters that the tokens do not give back, if a run warns of so many."""
        share = (self.changed + self.lost + self.unknown) / max(1, self.characters)
        return f"{share:.1%} of the characters" if share > CHANGED_SHARE else None

    @property
    def bits_note(self) -> str:
        """Why bits per byte are too low: bytes count whose characters have no token. Or empty."""
        changed = self.changed_share
        return f" (too low: the tokenizer drops or replaces {changed})" if changed else ""

    def add(self, other: "TextCounts") -> None:
        """Add the counts of other documents."""
        for name in type(self).model_fields:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Account(BaseModel):
    """Account of one source."""

    model_config = ConfigDict(extra="forbid")

    found: Tally
    """All files of the source: regular files with their sizes, and other paths with size 0."""
    read: Tally
    left_out: dict[str, Tally]
    marked_files: int = Field(default=0, ge=0)
    """Number of files of text that are divided at END_MARKS (source_format.py)."""
    documents: int = Field(ge=0)
    """Number of lines, rows or sections that were found in the files."""
    empty_documents: int = Field(ge=0)
    broken_documents: int = Field(ge=0)
    """Number of lines, rows or sections that are not text (data.broken=skip)."""
    repeated_documents: int = Field(ge=0)
    """Number of copies of earlier documents (data.unique=true)."""
    examples: list[str]
    """First documents that are not text, with the reasons."""
    text: TextCounts

    def check(self, kept_documents: int) -> None:
        """Verify that the account adds up; `kept_documents` is the number of both splits."""
        files = self.read.files + sum(tally.files for tally in self.left_out.values())
        size = self.read.bytes + sum(tally.bytes for tally in self.left_out.values())
        assert (files, size) == (self.found.files, self.found.bytes), "files are not accounted for"
        left_out = self.empty_documents + self.broken_documents + self.repeated_documents
        assert self.documents == kept_documents + left_out, "documents are not accounted for"

    @property
    def warnings(self) -> list[str]:
        """What to do about many characters that the tokenizer lacks or changes, and about marks."""
        found, changed = [self.warning], self.text.changed_share
        if changed is not None:
            most = "".join(f", mostly {kind}" for kind, _ in self.text.changed_by.most_common(1))
            found.append(
                f"the tokenizer drops or replaces {changed}{most}: no model can learn them, and "
                "bits per byte are too low. Set data.tokenizer to one that keeps all text, or to "
                "null to train one"
            )
        if self.text.end_marks > MARKS_SHARE * self.documents:
            found.append(
                f"<|endoftext|> stands {self.text.end_marks:,} times in documents as ordinary "
                "text. Remove it or, to divide documents there, end lines of a text file with it"
            )
        if self.text.ends:
            found.append(
                f"the token that ends documents stands {self.text.ends:,} times in their text, "
                "which is divided there: set data.end_of_document to a token that no text has"
            )
        return [warning for warning in found if warning is not None]

    @property
    def warning(self) -> str | None:
        """What to do if the tokenizer knows few characters of the text; None if it knows most."""
        if self.text.byte_share <= BYTES_SHARE:
            return None
        return (
            f"{self.text.byte_share:.0%} of the text is encoded as single bytes, because the "
            "tokenizer lacks its characters: set data.tokenizer to a tokenizer for its script, or "
            "to null and data.vocabulary to more tokens"
        )

    def summary(self) -> str:
        """Return the account in one short line, with the most frequent reason of what is absent."""
        files = sum(tally.files for tally in self.left_out.values())
        of_documents = {
            "empty": self.empty_documents,
            "repeated": self.repeated_documents,
            "not text": self.broken_documents,
        }
        documents = sum(of_documents.values())
        of_files = {reason: tally.files for reason, tally in self.left_out.items()}
        shown = [
            f"{count:,} of {counted(found, noun, ',')} left out ({_most_frequent(reasons)})"
            for count, found, noun, reasons in (
                (files, self.found.files, "file", of_files),
                (documents, self.documents, "document", of_documents),
            )
            if count
        ]
        counts = (
            (self.text.lost, "character", "without a token"),
            (self.text.unknown, "character", "unknown"),
            (self.text.changed, "character", "that the tokenizer drops or replaces"),
            (self.text.replaced, "character", "replaced"),
        )
        shown += [f"{counted(n, noun, ',')} {what}" for n, noun, what in counts if n]
        shown = shown or ["nothing left out"]
        if self.warning:
            shown.append(f"{self.text.byte_share:.0%} of the text encoded as single bytes")
        return ", ".join(shown)


def _most_frequent(reasons: Mapping[str, int]) -> str:
    """Return the reason with the largest count, and whether there are others."""
    most, total = max(reasons, key=reasons.__getitem__), sum(reasons.values())
    if reasons[most] == total:
        return most
    return f"mostly {most}" if 2 * reasons[most] > total else f"{most} and others"


class Split(BaseModel):
    """Sizes of one split, the documents for training or the documents for validation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int
    tokens: int
    """Number of tokens, including end-of-document tokens."""
    text_bytes: int
    bin_sha256: str

    @property
    def text_bytes_per_token(self) -> float:
        """Mean length in UTF-8 of the tokens that do not end a document; 0 if there are none."""
        return self.text_bytes / max(1, self.tokens - self.documents)


class Manifest(BaseModel):
    """Description of a prepared corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[3]
    name: str
    kind: str
    source: str
    source_sha256: str
    """Digest of the names and contents of the source files."""
    account: Account | None
    """What was read and what was left out; None in the sum of several manifests."""
    pieces: int
    """Size of the vocabulary, including special tokens. On a small corpus it is less than
    data.vocabulary. (The key cannot be renamed, because it is stored in prepared corpora.)"""
    eod: int
    dtype: Literal["uint16", "int32"]
    tokenizer_sha256: str
    """Digest of the files of the tokenizer (`digest_tokenizer`)."""
    train: Split
    validation: Split

    def warnings(self, validation_percent: float) -> list[str]:
        """What to do about the account's warnings, and about a bad division into splits."""
        found = [] if self.account is None else self.account.warnings
        share = self.validation.tokens / (self.train.tokens + self.validation.tokens)
        if share > most_validation(validation_percent):
            found.append(
                f"{share:.0%} of the tokens are for validation, at data.validation_percent="
                f"{validation_percent:g}, because it has few documents, which are long: divide the "
                "text into more files, or by blank lines"
            )
        return found

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a manifest.

        Raises a DataError if the file is absent, damaged or in another format.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise damaged(path, error.strerror or str(error)) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise damaged(path, f"{where}: {first['msg']}") from error

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
        """Check the sizes of all files of tokens and the headers of the index files."""
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
                raise damaged(prefix.with_suffix(".idx"), "it does not match the manifest")


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
        raise damaged(path, error.strerror or str(error)) from error
    if size != wanted:
        raise damaged(path, f"it has {size} bytes and should have {wanted}")


def damaged(path: Path, why: str = "its content has changed since it was prepared") -> DataError:
    """Return the error for a damaged file in the folder of a prepared corpus."""
    return DataError(
        f"{path} is damaged: {why}\n"
        f"  do: delete the folder {path.parent}; it is prepared again at the next start, if "
        "data.path is its text"
    )


@dataclass(frozen=True)
class Damage:
    """The first block of a file that differs."""

    path: Path
    start: int
    end: int

    def __str__(self) -> str:
        where = f"bytes {self.start} to {self.end}"
        return str(damaged(self.path, f"its content has changed since it was prepared, in {where}"))


def write_digests(folder: Path, files: Sequence[str] = _FILES) -> None:
    """Write digests.json of a corpus that was just prepared, or of other files."""
    digests = {name: list(_digests(folder / name, BLOCK_BYTES)) for name in files}
    (folder / DIGESTS_FILE).write_text(json.dumps(digests))


def find_damage(
    folder: Path, on_read: OnRead | None = None, files: Sequence[str] = _FILES
) -> Damage | None:
    """Read files of a corpus; note that these are whole, or return the first damage."""
    before = _fingerprint(folder, files)
    try:
        known = _DIGESTS.validate_json((folder / DIGESTS_FILE).read_bytes())
    except (OSError, ValidationError):
        known = {}
    if not before.keys() <= known.keys():
        return Damage(folder / DIGESTS_FILE, 0, 0)
    for name, (size, *_) in before.items():
        for number, digest in enumerate(_digests(folder / name, BLOCK_BYTES, on_read)):
            if [digest] != known[name][number : number + 1]:
                start = number * BLOCK_BYTES
                return Damage(folder / name, start, min(start + BLOCK_BYTES, size))
    with suppress(OSError):  # the folder of another user: every start reads the files
        note = json.dumps(_note(folder) | before)
        replace_text(folder / NOTE_FILE, note, f"-{uuid.uuid4().hex[:12]}")
    return None


def is_verified(folder: Path, files: Sequence[str] = _FILES) -> bool:
    """Return whether `find_damage` has found the files whole, and they have not changed since."""
    with suppress(OSError):
        return _fingerprint(folder, files).items() <= _note(folder).items()
    return False


def _note(folder: Path) -> dict[str, list[int]]:
    """Return the fingerprints of the files that were found whole; none without a usable note."""
    with suppress(OSError, ValidationError):
        return _FINGERPRINTS.validate_json((folder / NOTE_FILE).read_bytes())
    return {}


def _fingerprint(folder: Path, files: Sequence[str]) -> dict[str, list[int]]:
    """Return the size, the time of the last change and the inode of each file."""
    found = {name: (folder / name).stat() for name in files}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in found.items()}


def _digests(path: Path, block: int, on_read: OnRead | None = None) -> Iterator[str]:
    hasher, left = xxhash.xxh3_128(), block
    with path.open("rb") as stream:
        while piece := stream.read(min(MIB, left)):
            hasher.update(piece)
            left -= len(piece)
            if on_read is not None:
                on_read(len(piece))
            if not left:
                yield hasher.hexdigest()
                hasher, left = xxhash.xxh3_128(), block
    if left < block:
        yield hasher.hexdigest()
