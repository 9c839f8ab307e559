"""Tokenise the parts of a source in worker processes, and merge them into the files of a corpus.

Part number 42 has these files:

    00042.train.bin  00042.validation.bin    tokens of the documents, concatenated
    00042.documents                          table with one row per document (COLUMNS), uint64
    00042.json                               the note: counts of skipped texts. It is written last,
                                             so it marks the part as done.

The division into parts depends only on the source, not on the number of workers. The tokens of the
corpus are the tokens of all parts in order. For each split (training and validation) three files
are merged:

    train.bin       tokens of all documents (Megatron's indexed format)
    train.idx       header; then of all documents the lengths in tokens (int32), the offsets in
                    train.bin in bytes (int64), and the numbers from 0 on (int64)
    train.places    number of each document's line, row or section in its source file (int64)

If data.unique is set, documents that repeat an earlier one are left out. All files are written as
streams; memory holds the table of documents of one part at a time.
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, Field

from frontier_llm.atomic_files import new_file
from frontier_llm.data.corpus_manifest import Split, TextCounts, idx_header, printable
from frontier_llm.data.source import Document, Source, first_lines
from frontier_llm.data.source_format import Cut, Entry, Scan
from frontier_llm.data.tokenizer import Encoder
from frontier_llm.errors import DataError
from frontier_llm.units import MIB

PART_BYTES = 8 * MIB
"""Size of a part of the source; the last cut of a part may exceed it."""
SPLITS = ("train", "validation")
COLUMNS = ("split", "file", "place", "tokens", "text_bytes", "hash_high", "hash_low")
"""Columns of the table of documents: index in SPLITS, index of the file in the source, number of
the line, row or section in the file, number of tokens, size of the text in bytes, and the upper and
the lower half of its 128-bit hash."""
MAX_EXAMPLES = 10
Rows = npt.NDArray[np.uint64]
"""Table of documents: [documents, len(COLUMNS)]."""
LONGEST_DOCUMENT_TOKENS = 2**31 - 1
"""Limit of Megatron's index, which stores the length of a document as int32."""
_LOW_64_BITS = 2**64 - 1
COPY_BYTES = 4 * MIB
ROUND_DOCUMENTS = 1 << 22
"""Approximate number of documents whose hashes are compared at once. This limits the memory."""
_COLUMN = {name: index for index, name in enumerate(COLUMNS)}
_REPAIR = (
    "repair what is wrong, set data.text_key to the field that holds the text, or skip and count "
    "such entries with data.broken=skip"
)
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Part:
    """A portion of the source: consecutive cuts. A `Cut` is a range of one source file."""

    number: int
    cuts: tuple[tuple[int, Cut], ...]
    """(index of the file in the source, cut of that file), in order."""

    @property
    def size(self) -> int:
        """Size of the cuts in bytes."""
        return sum(cut.size for _, cut in self.cuts)


class SkippedTexts(BaseModel):
    """Counts of what is left out of the documents of a source, or changed in them."""

    empty: int = 0
    broken: int = 0
    """Number of lines, rows or sections that are not text, such as invalid UTF-8."""
    examples: list[str] = []
    """Names of the first lines, rows or sections that are not text, with the reasons."""
    text: TextCounts = Field(default_factory=TextCounts)

    def add(self, other: "SkippedTexts") -> None:
        """Add the counts of a later part."""
        self.empty += other.empty
        self.broken += other.broken
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]
        self.text.add(other.text)


@dataclass(frozen=True)
class PartFiles:
    """Paths and content of the parts' files in one folder."""

    folder: Path

    def tokens(self, number: int, split: int) -> Path:
        """Return the path of a part's token file of one split."""
        return self.folder / f"{number:05d}.{SPLITS[split]}.bin"

    def documents(self, number: int) -> Path:
        """Return the path of a part's table of documents."""
        return self.folder / f"{number:05d}.documents"

    def note(self, number: int) -> Path:
        """Return the path of a part's note, which exists once the part is done."""
        return self.folder / f"{number:05d}.json"

    def is_done(self, number: int) -> bool:
        """Return whether all files of a part are written."""
        return self.note(number).exists()

    def skipped(self, number: int) -> SkippedTexts:
        """Read the counts of skipped texts of a part."""
        return SkippedTexts.model_validate_json(self.note(number).read_bytes())

    def rows(self, number: int) -> Rows:
        """Read a part's table of documents: [documents, len(COLUMNS)] uint64."""
        return np.fromfile(self.documents(number), dtype=np.uint64).reshape(-1, len(COLUMNS))


def plan_parts(scans: Sequence[Scan]) -> list[Part]:
    """Group the cuts of all files, in order, into parts of about PART_BYTES."""
    return [Part(number, tuple(cuts)) for number, cuts in enumerate(_group_cuts(scans))]


def _group_cuts(scans: Sequence[Scan]) -> Iterator[list[tuple[int, Cut]]]:
    cuts: list[tuple[int, Cut]] = []
    size = 0
    for file, scan in enumerate(scans):
        for cut in scan.cuts:
            cuts.append((file, cut))
            size += cut.size
            if size >= PART_BYTES:
                yield cuts
                cuts, size = [], 0
    if cuts:
        yield cuts


@dataclass(frozen=True)
class PartReader:
    """Reads the documents of parts of a source."""

    source: Source
    skip_broken: bool
    """If true, entries (lines, rows or sections of a file) that are not text are counted and left
    out. Otherwise they raise an error."""

    def documents(self, part: Part, skipped: SkippedTexts) -> Iterator[tuple[int, int, Document]]:
        """Yield the documents of a part in order.

        Raises a DataError if some are not text; it names the first of them and counts those of the
        part. Also raises one if a file changed, because the cuts are those of its former content.
        """
        problems: list[str] = []
        advice = ""
        for file, cut in part.cuts:
            for name, entry, todo in self._entries(file, cut):
                if entry.problem is not None:
                    problem = printable(f"{name}: {entry.problem}")
                    skipped.add(SkippedTexts(broken=1, examples=[problem]))
                    if not self.skip_broken:
                        problems.append(f"{self.source.folder / name}: {entry.problem}")
                        advice = todo if len(problems) == 1 else _REPAIR
                elif not entry.text:
                    skipped.empty += 1
                elif not problems:
                    skipped.text.replaced += entry.replaced
                    yield file, entry.place, Document(name, entry.text)
        self.source.refuse_changed({file for file, _ in part.cuts})
        if problems:
            found = problems[0]
            if len(problems) > 1:
                found = (
                    f"{len(problems):,} or more entries in {self.source.root} are no text:\n"
                    f"{first_lines(problems)}"
                )
            raise DataError(f"{found}\n  do: {advice}")

    def _entries(self, file: int, cut: Cut) -> Iterator[tuple[str, Entry, str]]:
        """Yield (name, entry, what to do if it is no text) of a cut.

        Damage of the file, which ends the cut, is the last entry.
        """
        place, source = cut.number, self.source.files[file]
        try:
            for entry in self.source.entries(file, cut):
                place = entry.place
                yield self.source.name(file, entry.place), entry, _REPAIR
        except DataError as error:
            problem, _, advice = str(error).partition("\n  do: ")
            problem = problem.replace(f"{source.path}: ", "").replace(f"{source.path} is", "it is")
            yield source.name, Entry(place, "", problem), advice


class PartWriter:
    """Tokenises parts and writes their files. Each process needs its own."""

    def __init__(
        self, reader: PartReader, encoder: Encoder, files: PartFiles, validation_percent: float
    ) -> None:
        self._reader, self._encoder, self._files = reader, encoder, files
        self._percent = validation_percent

    def write(self, part: Part) -> None:
        """Write all files of a part, which other processes may write at the same time."""
        skipped = SkippedTexts()
        tokens = [self._files.tokens(part.number, split) for split in range(len(SPLITS))]
        own = f"-{os.getpid()}.draft"  # no other process of this host writes it
        with new_file(tokens[0], own) as train, new_file(tokens[1], own) as validation:
            rows = self._write_tokens(part, (train, validation), skipped)
        with new_file(self._files.documents(part.number), own) as stream:
            rows.tofile(stream)
        with new_file(self._files.note(part.number), own) as stream:
            stream.write(skipped.model_dump_json().encode())

    def _write_tokens(
        self, part: Part, streams: Sequence[IO[bytes]], skipped: SkippedTexts
    ) -> "array[int]":
        """Write the tokens of all documents of a part."""
        rows = array("Q")
        token_bytes = len(self._encoder.eod)
        for file, place, document in self._reader.documents(part, skipped):
            text = document.text.encode()
            split = int(document.is_validation(self._percent))
            tokens = self._encoder.encode(document.text, skipped.text) + self._encoder.eod
            if skipped.text.ends and not self._reader.skip_broken:
                raise DataError(
                    f"{self._reader.source.folder / document.name}: {self._encoder.end!r}, the "
                    "token that ends documents, stands for a part of this text, which would be "
                    "divided there\n"
                    "  do: set data.end_of_document to a token that no text has (add a special "
                    "token to the tokenizer if it has none), or remove it from the text; "
                    "data.broken=skip divides documents there"
                )
            count = len(tokens) // token_bytes
            if count > LONGEST_DOCUMENT_TOKENS:
                raise DataError(
                    f"{document.name} has {count} tokens, more than an index file can represent "
                    f"({LONGEST_DOCUMENT_TOKENS})\n  do: split it into several documents"
                )
            streams[split].write(tokens)
            text_hash = xxhash.xxh3_128_intdigest(text)
            high, low = text_hash >> 64, text_hash & _LOW_64_BITS
            rows.extend((split, file, place, count, len(text), high, low))
        return rows


class Merger:
    """Merges the parts of one corpus."""

    def __init__(
        self,
        files: PartFiles,
        parts: int,
        dtype: type[np.generic],
        repeated: Sequence[Mask] | None,
        on_part: Callable[[], None],
    ) -> None:
        self._files, self._parts, self._dtype = files, parts, np.dtype(dtype)
        self._repeated, self._on_part = repeated, on_part

    def write_split(self, split: int, folder: Path) -> Split:
        """Write the files of a split and return its sizes."""
        prefix = folder / SPLITS[split]
        digest = self._write_tokens(split, prefix.with_suffix(".bin"))
        documents, tokens, text_bytes = self._count(split)
        self._write_index(split, documents, prefix.with_suffix(".idx"))
        with prefix.with_suffix(".places").open("wb") as stream:
            for rows in self._rows(split):
                rows[:, _COLUMN["place"]].astype(np.int64).tofile(stream)
        return Split(documents=documents, tokens=tokens, text_bytes=text_bytes, bin_sha256=digest)

    def count_by_file(self, split: int, files: int) -> npt.NDArray[np.int64]:
        """Return the documents of a split and the bytes of their text: [2, files] int64."""
        counts = np.zeros((2, files), dtype=np.int64)
        for rows in self._rows(split):
            file, text_bytes = rows[:, _COLUMN["file"]], rows[:, _COLUMN["text_bytes"]]
            np.add.at(counts[0], file.astype(np.int64), 1)
            np.add.at(counts[1], file.astype(np.int64), text_bytes.astype(np.int64))
        return counts

    def _rows(self, split: int) -> Iterator[Rows]:
        """Yield per part the rows of its table of documents that a split keeps."""
        for number in range(self._parts):
            rows = self._files.rows(number)
            yield rows[self._kept(number, rows) & (rows[:, _COLUMN["split"]] == split)]

    def _kept(self, number: int, rows: Rows) -> Mask:
        if self._repeated is None:
            return np.ones(len(rows), dtype=np.bool_)
        return ~self._repeated[number]

    def _count(self, split: int) -> tuple[int, int, int]:
        documents = tokens = text_bytes = 0
        for rows in self._rows(split):
            documents += len(rows)
            tokens += int(rows[:, _COLUMN["tokens"]].sum())
            text_bytes += int(rows[:, _COLUMN["text_bytes"]].sum())
        return documents, tokens, text_bytes

    def _write_tokens(self, split: int, path: Path) -> str:
        """Write the token file of a split and return its SHA-256."""
        hasher = hashlib.sha256()
        with path.open("wb") as target:
            for number in range(self._parts):
                with self._files.tokens(number, split).open("rb") as source:
                    for start, end in self._kept_ranges(number, split):
                        source.seek(start)
                        _copy(source, target, end - start, hasher.update)
                self._on_part()
        return hasher.hexdigest()

    def _kept_ranges(self, number: int, split: int) -> Iterator[tuple[int, int]]:
        """Yield the longest byte ranges of a part's token file that hold documents to keep."""
        rows = self._files.rows(number)
        in_split = rows[:, _COLUMN["split"]] == split
        tokens = rows[in_split, _COLUMN["tokens"]].astype(np.int64)
        ends = np.cumsum(tokens) * self._dtype.itemsize
        kept = self._kept(number, rows)[in_split]
        # a range starts or ends wherever the mask changes; the mask is false outside the file
        changes = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]])))
        bounds = np.concatenate([[0], ends])[changes]
        yield from zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)

    def _write_index(self, split: int, documents: int, path: Path) -> None:
        length = _COLUMN["tokens"]
        with path.open("wb") as stream:
            stream.write(idx_header(self._dtype.type, documents))
            for rows in self._rows(split):
                rows[:, length].astype(np.int32).tofile(stream)
            end = 0  # end of the previous document in the token file, in bytes
            for rows in self._rows(split):
                ends = end + np.cumsum(rows[:, length].astype(np.int64)) * self._dtype.itemsize
                np.concatenate([[end], ends])[:-1].astype(np.int64).tofile(stream)
                end = int(ends[-1]) if len(ends) else end
            for start in range(0, documents + 1, MIB):
                np.arange(start, min(start + MIB, documents + 1), dtype=np.int64).tofile(stream)


def _copy(
    source: IO[bytes], target: IO[bytes], count: int, on_block: Callable[[bytes], None]
) -> None:
    """Copy `count` bytes and call `on_block` with each copied block."""
    while count:
        block = source.read(min(count, COPY_BYTES))
        assert block, "a part's token file is shorter than its table of documents"
        on_block(block)
        target.write(block)
        count -= len(block)


def find_duplicates(files: PartFiles, counts: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """Find the documents that repeat an earlier document of the source.

    Documents are compared by the 128-bit xxh3 hash of their text, and splits are not distinguished.
    To limit the memory, each of several rounds compares only hashes that begin with the same bits.
    """
    starts = np.concatenate([[0], np.cumsum(counts)])
    repeated = np.zeros(int(starts[-1]), dtype=np.bool_)
    prefix_bits = max(0, (int(starts[-1]) // ROUND_DOCUMENTS).bit_length())
    for prefix in range(1 << prefix_bits):
        _mark_round(files, starts, prefix_bits, prefix, repeated)
    return [repeated[start:end] for start, end in pairwise(starts)]


def _mark_round(
    files: PartFiles,
    starts: npt.NDArray[np.int64],
    prefix_bits: int,
    prefix: int,
    repeated: npt.NDArray[np.bool_],
) -> None:
    """Mark the duplicates among the documents whose hashes begin with the same bits."""
    selected = [np.empty((3, 0), dtype=np.uint64)]
    for part, start in enumerate(starts[:-1]):
        rows = files.rows(part)
        high, low = rows[:, _COLUMN["hash_high"]], rows[:, _COLUMN["hash_low"]]
        indices = np.arange(start, start + len(rows), dtype=np.uint64)
        # NumPy does not define a shift by 64 bits
        mask = high >> np.uint64(64 - prefix_bits) == prefix if prefix_bits else slice(None)
        selected.append(np.stack([column[mask] for column in (high, low, indices)]))
    high, low, index = np.concatenate(selected, axis=1)
    # sorted by hash, equal documents are neighbours, and the earliest of them comes first
    order = np.lexsort((index, low, high))
    high, low, index = high[order], low[order], index[order]
    equals_previous = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    repeated[index[1:][equals_previous]] = True
