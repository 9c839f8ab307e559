"""Merge the parts that the workers have tokenised into the files of a corpus.

For each split (training and validation) three files are written:

    train.bin       tokens of all documents (Megatron's indexed format)
    train.idx       header; then of all documents the lengths in tokens (int32), the offsets in
                    train.bin in bytes (int64), and the numbers from 0 on (int64)
    train.places    number of each document's line, row or section in its source file (int64)

If data.unique is set, documents that repeat an earlier one are left out. All files are written as
streams; memory holds the table of documents of one part at a time.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from frontier_llm.data.corpus_manifest import Split, idx_header
from frontier_llm.data.corpus_parts import COLUMNS, SPLITS, PartFiles, Rows
from frontier_llm.units import MIB

COPY_BYTES = 4 * MIB
"""Number of bytes that are copied at a time."""
ROUND_DOCUMENTS = 1 << 22
"""Approximate number of documents whose hashes are compared at once. This limits the memory."""
_COLUMN = {name: index for index, name in enumerate(COLUMNS)}
Mask = npt.NDArray[np.bool_]
"""One boolean per document of a part."""


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
        """Yield the byte ranges of a part's token file that hold documents to keep.

        A range covers as many consecutive kept documents as possible.
        """
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
