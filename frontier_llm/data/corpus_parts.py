"""The parts of a corpus, each tokenised by one worker, and their files on disk.

    00042.train.bin  00042.validation.bin    tokens of the documents, concatenated
    00042.documents                          one row of COLUMNS per document, uint64, in order
    00042.json                               counts of skipped texts; written last: the part is done

Parts depend only on the source, not on the number of workers. The corpus is the concatenation of
all parts in order.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frontier_llm.data.source_format import Cut, Scan
from frontier_llm.units import MIB

PART_BYTES = 8 * MIB
SPLITS = ("train", "validation")
COLUMNS = ("split", "file", "place", "tokens", "text_bytes", "hash_high", "hash_low")
"""Columns of the table of documents: index in SPLITS, index of the file in the source, place of the
text in the file (data/source_format.py), number of tokens, number of bytes of the text, and the
upper and lower half of its 128-bit hash."""
EXAMPLES = 10
Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Part:
    """Consecutive cuts, which are ranges of the source files (`Cut`)."""

    number: int
    cuts: tuple[tuple[int, Cut], ...]
    """(index of the file in the source, cut of that file), in order."""

    @property
    def size(self) -> int:
        """Size of the cuts in bytes."""
        return sum(cut.size for _, cut in self.cuts)


@dataclass
class SkippedTexts:
    """Counts of entries that were read and are not documents."""

    empty: int = 0
    """Number of empty texts."""
    broken: int = 0
    """Number of entries that are not text."""
    examples: list[str] = field(default_factory=list)
    """First entries that are not text: where they are, and why."""

    def add(self, other: "SkippedTexts") -> None:
        """Add the counts of a later part."""
        self.empty += other.empty
        self.broken += other.broken
        self.examples = (self.examples + other.examples)[:EXAMPLES]

    def add_broken(self, example: str) -> None:
        """Count one entry that is not text."""
        self.add(SkippedTexts(broken=1, examples=[example]))


@dataclass(frozen=True)
class PartFiles:
    """Paths and content of the parts' files in one folder."""

    folder: Path

    def tokens(self, number: int, split: int) -> Path:
        """Return the path of the token file of a split."""
        return self.folder / f"{number:05d}.{SPLITS[split]}.bin"

    def documents(self, number: int) -> Path:
        """Return the path of the table of documents."""
        return self.folder / f"{number:05d}.documents"

    def note(self, number: int) -> Path:
        """Return the path of the note, which exists once the part is done."""
        return self.folder / f"{number:05d}.json"

    def is_done(self, number: int) -> bool:
        """Return whether all files of a part are written."""
        return self.note(number).exists()

    def skipped(self, number: int) -> SkippedTexts:
        """Read the counts of skipped texts of a part."""
        return SkippedTexts(**json.loads(self.note(number).read_text()))

    def rows(self, number: int) -> Rows:
        """Read the table of documents: [documents, len(COLUMNS)] uint64."""
        return np.fromfile(self.documents(number), dtype=np.uint64).reshape(-1, len(COLUMNS))

    def write_note(self, number: int, skipped: SkippedTexts) -> None:
        """Write the note, which marks a part as done."""
        draft = self.note(number).with_suffix(".draft")
        with draft.open("w") as stream:
            json.dump(asdict(skipped), stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.note(number))


def plan_parts(scans: Sequence[Scan]) -> list[Part]:
    """Group the cuts of all files, in order, into parts of about PART_BYTES."""
    return [Part(number, tuple(cuts)) for number, cuts in enumerate(_group(scans))]


def _group(scans: Sequence[Scan]) -> Iterator[list[tuple[int, Cut]]]:
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
