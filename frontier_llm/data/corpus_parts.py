"""Define the parts of a source, each tokenised by one worker process, and their files on disk.

Part number 42 has these files:

    00042.train.bin  00042.validation.bin    tokens of the documents, concatenated
    00042.documents                          table with one row per document (COLUMNS), uint64
    00042.json                               the note: counts of skipped texts. It is written last,
                                             so it marks the part as done.

The division into parts depends only on the source, not on the number of workers. The tokens of the
corpus are the tokens of all parts in order.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from frontier_llm.data.corpus_account import TextCounts
from frontier_llm.data.source_format import Cut, Scan
from frontier_llm.units import MIB

PART_BYTES = 8 * MIB
"""Size of a part of the source; the last cut of a part may exceed it."""
SPLITS = ("train", "validation")
COLUMNS = ("split", "file", "place", "tokens", "text_bytes", "hash_high", "hash_low")
"""Columns of the table of documents: index in SPLITS, index of the file in the source, number of
the line, row or section in the file, number of tokens, size of the text in bytes, and the upper and
the lower half of its 128-bit hash."""
MAX_EXAMPLES = 10
"""Number of skipped texts that are kept as examples for the user."""
Rows = npt.NDArray[np.uint64]
"""Table of documents: [documents, len(COLUMNS)]."""


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
    """Number of empty texts."""
    broken: int = 0
    """Number of lines, rows or sections that are not text, such as invalid UTF-8."""
    examples: list[str] = []
    """Names of the first lines, rows or sections that are not text, with the reasons."""
    text: TextCounts = Field(default_factory=TextCounts)
    """Counts of the characters of the documents that are kept."""

    def add(self, other: "SkippedTexts") -> None:
        """Add the counts of a later part."""
        self.empty += other.empty
        self.broken += other.broken
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]
        self.text.add(other.text)

    def add_broken(self, example: str) -> None:
        """Count one line, row or section that is not text."""
        self.add(SkippedTexts(broken=1, examples=[example]))


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

    def write_note(self, number: int, skipped: SkippedTexts) -> None:
        """Write the note, which marks a part as done."""
        draft = self.note(number).with_suffix(".draft")
        with draft.open("w") as stream:
            stream.write(skipped.model_dump_json())
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.note(number))


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
