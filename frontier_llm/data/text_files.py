"""Read plain text files. A short file is one document; a long file is divided into sections.

The classes implement the interface of data/source_format.py: `scan` finds the *cuts*, the ranges
of a file that workers can read independently, and `entries` yields the texts of one cut.
"""

import hashlib
import io
from collections.abc import Iterator
from functools import cached_property

from frontier_llm.data.source_format import (
    CUT_BYTES,
    Cut,
    Entry,
    Format,
    NoTextError,
    Scan,
    Undivided,
    decode,
    open_plain,
)
from frontier_llm.units import KIB, MIB

LONG_FILE_BYTES = 4 * MIB
"""A plain text file of more bytes is divided into several documents."""
SECTION_BYTES = 64 * KIB
"""A section of a large file has about this size."""
SMALL_FILE_SECTIONS = 128
"""Number of sections of a file that is too small for this number of sections of SECTION_BYTES."""
_CHARACTER_BYTES = 4
"""Largest number of bytes of a character in UTF-8."""


class WholeText(Format):
    """A file that is one document."""

    mark = ""

    def scan(self) -> Scan:
        """Read the file and check that it is text."""
        content = self.path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if not content:
            return Scan(digest, ())
        try:
            decode(content)
        except NoTextError as error:
            return Scan(digest, (), f"not UTF-8 text: {error}")
        return Scan(digest, (Cut(0, len(content), 0, len(content)),))

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the text of the file."""
        yield _entry(cut.number, self.path.read_bytes(), cut.start)


class LongText(Undivided):
    """A file that is divided into sections, each of which is a document.

    A section ends at the first blank line after the intended size. If there is none within four
    times this size, the section ends at the end of any line. A compressed file has a single cut.
    """

    mark = "#"
    first = 0

    def scan(self) -> Scan:
        """Digest the file and divide it into cuts between sections.

        The file counts as holding no text if its first section is not text.
        """
        first = next(self.entries(Cut(0, 1, 0, 1)), None)
        problem = "it is empty" if first is None else first.problem
        if self.compression:
            scan = super().scan()
            return scan if problem is None else Scan(scan.sha256, (), problem)
        hasher, cuts = hashlib.sha256(), []
        cut_start = position = cut_section = 0
        with self.path.open("rb") as stream:
            for number, section in enumerate(self._sections(stream)):
                hasher.update(section)
                position += len(section)
                if position - cut_start >= CUT_BYTES:
                    cuts.append(Cut(cut_start, position, cut_section, position - cut_start))
                    cut_start, cut_section = position, number + 1
        if position > cut_start:
            cuts.append(Cut(cut_start, position, cut_section, position - cut_start))
        return Scan(hasher.hexdigest(), () if problem else tuple(cuts), problem or "")

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the sections of a cut."""
        with open_plain(self.path, self.compression) as stream:
            position = 0 if self.compression else stream.seek(cut.start)
            for number, section in enumerate(self._sections(stream), cut.number):
                yield _entry(number, section, position)
                position += len(section)
                if position >= cut.end and not self.compression:
                    break

    def _section_bytes(self) -> int:
        return min(SECTION_BYTES, max(self._plain_bytes // SMALL_FILE_SECTIONS, 1))

    @cached_property
    def _plain_bytes(self) -> int:
        """Size of the decompressed text, at most that from which on sections have full size."""
        if not self.compression:
            return self.size
        with open_plain(self.path, self.compression) as stream:
            return len(stream.read(SECTION_BYTES * SMALL_FILE_SECTIONS))

    def _sections(self, stream: io.BufferedReader) -> Iterator[bytes]:
        target = self._section_bytes()
        lines: list[bytes] = []
        size = 0
        while line := _read_line(stream):
            lines.append(line)
            size += len(line)
            if size >= 4 * target or (size >= target and not line.strip()):
                yield b"".join(lines)
                lines, size = [], 0
        if lines:
            yield b"".join(lines)


class CompressedWholeText(LongText):
    """A compressed file of text that is one document, unless it is long."""

    def _section_bytes(self) -> int:
        is_long = self._plain_bytes > LONG_FILE_BYTES
        return super()._section_bytes() if is_long else LONG_FILE_BYTES


def _entry(place: int, content: bytes, start: int) -> Entry:
    """Decode the bytes of a document, which begin at byte `start` of the file."""
    try:
        return Entry(place, decode(content, start))
    except NoTextError as error:
        return Entry(place, "", f"not UTF-8 text: {error}")


def _read_line(stream: io.BufferedReader) -> bytes:
    """Read a line, or about SECTION_BYTES of a longer line without splitting a character."""
    line = stream.readline(SECTION_BYTES)
    for _ in range(_CHARACTER_BYTES - 1):
        following = b"" if line.endswith(b"\n") else stream.peek(1)[:1]
        if not following or following[0] & 0xC0 != 0x80:  # the next byte begins a character
            break
        line += stream.read(1)
    return line
