"""Merge parts into the files of a split, and find duplicate documents.

    train.bin       tokens (megatron's indexed format)
    train.idx       lengths (int32), starts (int64) and document indices (int64)
    train.places    position of each document in its source file (int64); files.jsonl lists the
                    source files

The files are written as streams: memory holds one part at a time.
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
ROUND_DOCUMENTS = 1 << 22
"""Approximate number of documents whose hashes are compared at once."""
_COLUMN = {name: index for index, name in enumerate(COLUMNS)}
Mask = npt.NDArray[np.bool_]


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
        """Initialise the merger; nothing is written yet.

        Args:
            files: files of the parts, all done.
            parts: number of parts.
            dtype: stored type of a token.
            repeated: masks of the documents to leave out, per part; None: keep all documents.
            on_part: called when the tokens of one part and split are copied.
        """
        self._files, self._parts, self._dtype = files, parts, np.dtype(dtype)
        self._repeated, self._on_part = repeated, on_part

    def write_split(self, split: int, folder: Path) -> Split:
        """Write the files of a split.

        Raises:
            OSError: the disk is full, or failed.
        """
        prefix = folder / SPLITS[split]
        digest = self._write_tokens(split, prefix.with_suffix(".bin"))
        documents, tokens, text_bytes = self._count(split)
        self._write_index(split, documents, prefix.with_suffix(".idx"))
        with prefix.with_suffix(".places").open("wb") as stream:
            for rows in self._rows(split):
                rows[:, _COLUMN["place"]].astype(np.int64).tofile(stream)
        return Split(documents=documents, tokens=tokens, text_bytes=text_bytes, bin_sha256=digest)

    def count_by_file(self, split: int, files: int) -> npt.NDArray[np.int64]:
        """Return the number of documents of a split per source file: [files] int64."""
        counts = np.zeros(files, dtype=np.int64)
        for rows in self._rows(split):
            counts += np.bincount(rows[:, _COLUMN["file"]].astype(np.int64), minlength=files)
        return counts

    def _rows(self, split: int) -> Iterator[Rows]:
        """Yield the rows of the kept documents of a split, part by part."""
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
        hasher = hashlib.sha256()
        with path.open("wb") as target:
            for number in range(self._parts):
                with self._files.tokens(number, split).open("rb") as source:
                    for start, end in self._runs(number, split):
                        source.seek(start)
                        _copy(source, target, end - start, hasher.update)
                self._on_part()
        return hasher.hexdigest()

    def _runs(self, number: int, split: int) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of a part's token file to keep, with adjacent ranges joined."""
        rows = self._files.rows(number)
        mine = rows[:, _COLUMN["split"]] == split
        ends = np.cumsum(rows[mine, _COLUMN["tokens"]].astype(np.int64)) * self._dtype.itemsize
        kept = self._kept(number, rows)[mine]
        # a range starts where a kept document follows a dropped one, and ends where one precedes it
        changes = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]])))
        bounds = np.concatenate([[0], ends])[changes]
        yield from zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)

    def _write_index(self, split: int, documents: int, path: Path) -> None:
        length = _COLUMN["tokens"]
        with path.open("wb") as stream:
            stream.write(idx_header(self._dtype.type, documents))
            for rows in self._rows(split):
                rows[:, length].astype(np.int32).tofile(stream)
            end = 0
            for rows in self._rows(split):
                ends = end + np.cumsum(rows[:, length].astype(np.int64)) * self._dtype.itemsize
                np.concatenate([[end], ends])[:-1].astype(np.int64).tofile(stream)
                end = int(ends[-1]) if len(ends) else end
            for start in range(0, documents + 1, MIB):
                np.arange(start, min(start + MIB, documents + 1), dtype=np.int64).tofile(stream)


def _copy(
    source: IO[bytes], target: IO[bytes], count: int, on_block: Callable[[bytes], None]
) -> None:
    while count:
        block = source.read(min(count, COPY_BYTES))
        assert block, "a part's token file is shorter than its table of documents"
        on_block(block)
        target.write(block)
        count -= len(block)


def find_duplicates(files: PartFiles, counts: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """Return a mask per part of the documents that repeat an earlier one: [documents] bool.

    Documents are compared by the 128-bit xxh3 hash of their text, in rounds of hashes with the same
    leading bits, which bounds the memory. Of equal documents the first in the order of the source
    is kept, whichever split it is in.

    Args:
        files: files of the parts, all done.
        counts: number of documents in each part.
    """
    starts = np.concatenate([[0], np.cumsum(counts)])
    repeated = np.zeros(int(starts[-1]), dtype=np.bool_)
    bits = max(0, (int(starts[-1]) // ROUND_DOCUMENTS).bit_length())
    for head in range(1 << bits):
        _mark_round(files, starts, bits, head, repeated)
    return [repeated[start:end] for start, end in pairwise(starts)]


def _mark_round(
    files: PartFiles,
    starts: npt.NDArray[np.int64],
    bits: int,
    head: int,
    repeated: npt.NDArray[np.bool_],
) -> None:
    """Mark duplicates among the documents whose hashes begin with the `bits` bits of `head`."""
    found = [np.empty((3, 0), dtype=np.uint64)]
    for part, start in enumerate(starts[:-1]):
        rows = files.rows(part)
        chosen = (
            rows[:, _COLUMN["hash_high"]] >> np.uint64(64 - bits) == head if bits else slice(None)
        )
        numbers = np.arange(start, start + len(rows), dtype=np.uint64)
        columns = (rows[:, _COLUMN["hash_high"]], rows[:, _COLUMN["hash_low"]], numbers)
        found.append(np.stack([column[chosen] for column in columns]))
    high, low, number = np.concatenate(found, axis=1)
    order = np.lexsort((number, low, high))
    high, low, number = high[order], low[order], number[order]
    same = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    repeated[number[1:][same]] = True
