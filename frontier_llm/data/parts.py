"""The parts of a corpus: what one worker tokenises at a time, and what it leaves on the disk.

    00042.train.bin  00042.validation.bin    tokens, documents one after another
    00042.documents                          a row of COLUMNS a document, uint64, in order
    00042.json                               what was no document; written last: the part is done

Parts depend on the source alone, never on how many workers there are, and what they hold put
together in their order is the corpus.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frontier_llm.data.formats import Cut, Scan
from frontier_llm.units import MIB

PART_BYTES = 8 * MIB
SPLITS = ("train", "validation")
COLUMNS = ("split", "file", "place", "tokens", "text_bytes", "hash_high", "hash_low")
EXAMPLES = 10
Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Part:
    """Stretches of files, in order."""

    number: int
    cuts: tuple[tuple[int, Cut], ...]
    """Which file of the source, and which stretch of it."""

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(cut.size for _, cut in self.cuts)


@dataclass
class Leftovers:
    """What was read and is no document."""

    empty: int = 0
    """Texts of no characters."""
    broken: int = 0
    """What is no text where a text should be."""
    examples: list[str] = field(default_factory=list)
    """The first of the broken: where they are, and why."""

    def add(self, other: "Leftovers") -> None:
        """Count those of a later part."""
        self.empty += other.empty
        self.broken += other.broken
        self.examples = (self.examples + other.examples)[:EXAMPLES]

    def add_broken(self, example: str) -> None:
        """Count one."""
        self.add(Leftovers(broken=1, examples=[example]))


@dataclass(frozen=True)
class PartFiles:
    """Where the parts lie."""

    folder: Path

    def tokens(self, number: int, split: int) -> Path:
        """Return the token file of a split."""
        return self.folder / f"{number:05d}.{SPLITS[split]}.bin"

    def documents(self, number: int) -> Path:
        """Return the table of documents."""
        return self.folder / f"{number:05d}.documents"

    def note(self, number: int) -> Path:
        """Return the note that says that the part is done."""
        return self.folder / f"{number:05d}.json"

    def is_done(self, number: int) -> bool:
        """Whether all files of a part are there."""
        return self.note(number).exists()

    def leftovers(self, number: int) -> Leftovers:
        """Read what was no document in a part."""
        return Leftovers(**json.loads(self.note(number).read_text()))

    def rows(self, number: int) -> Rows:
        """Read the table of documents: [documents, len(COLUMNS)] uint64."""
        return np.fromfile(self.documents(number), dtype=np.uint64).reshape(-1, len(COLUMNS))

    def write_note(self, number: int, leftovers: Leftovers) -> None:
        """Say that a part is done."""
        draft = self.note(number).with_suffix(".draft")
        with draft.open("w") as stream:
            json.dump(asdict(leftovers), stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.note(number))


def plan_parts(scans: Sequence[Scan]) -> list[Part]:
    """Gather the cuts of all files, in order, into parts of about PART_BYTES."""
    return [Part(number, tuple(cuts)) for number, cuts in enumerate(_gather(scans))]


def _gather(scans: Sequence[Scan]) -> Iterator[list[tuple[int, Cut]]]:
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
