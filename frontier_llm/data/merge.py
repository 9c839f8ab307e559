"""The parts put together: the token file, the index and the places of a split.

    train.bin       tokens (megatron's indexed format)
    train.idx       lengths (int32), starts (int64) and ends (int64) of the documents
    train.places    where in its file each document stood (int64; files.jsonl says which file)

Written in streams: memory holds one part at a time.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from frontier_llm.data.manifest import Split, idx_header
from frontier_llm.data.parts import COLUMNS, SPLITS, PartFiles, Rows
from frontier_llm.units import MIB

COPY_BYTES = 4 * MIB
_COLUMN = {name: index for index, name in enumerate(COLUMNS)}
Mask = npt.NDArray[np.bool_]


class Merger:
    """Puts the parts of one corpus together."""

    def __init__(
        self,
        files: PartFiles,
        parts: int,
        dtype: type[np.generic],
        repeated: Sequence[Mask] | None,
        on_part: Callable[[], None],
    ) -> None:
        """Prepare to write.

        Args:
            files: where the parts are, all done.
            parts: how many.
            dtype: of a token.
            repeated: which documents of each part to leave out; None = none.
            on_part: called when a part's tokens of a split are copied.
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
        """Count the documents of a split by the file they come from: [files] int64."""
        counts = np.zeros(files, dtype=np.int64)
        for rows in self._rows(split):
            counts += np.bincount(rows[:, _COLUMN["file"]].astype(np.int64), minlength=files)
        return counts

    def _rows(self, split: int) -> Iterator[Rows]:
        """Yield the rows of the documents of a split that stay, part by part."""
        for number in range(self._parts):
            rows = self._files.rows(number)
            yield rows[self._stays(number, rows) & (rows[:, _COLUMN["split"]] == split)]

    def _stays(self, number: int, rows: Rows) -> Mask:
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
        """Yield the byte ranges of a part's token file that stay, neighbours in one."""
        rows = self._files.rows(number)
        mine = rows[:, _COLUMN["split"]] == split
        ends = np.cumsum(rows[mine, _COLUMN["tokens"]].astype(np.int64)) * self._dtype.itemsize
        stays = self._stays(number, rows)[mine]
        # a run begins where one that goes is followed by one that stays, and ends the other way
        changes = np.flatnonzero(np.diff(np.concatenate([[False], stays, [False]])))
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
        assert block, "a part is as long as its table says"
        on_block(block)
        target.write(block)
        count -= len(block)
