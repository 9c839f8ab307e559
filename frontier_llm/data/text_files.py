"""Read plain text files: a short file is one document, a long one is split into sections."""

import hashlib
import io
from collections.abc import Iterator

from frontier_llm.data.source_format import CUT_BYTES, Cut, Entry, Format, NoTextError, Scan, decode
from frontier_llm.units import KIB

SECTION_BYTES = 64 * KIB
SMALL_FILE_SECTIONS = 128
"""A file too small for sections of SECTION_BYTES is split into about as many sections."""
_CHARACTER_BYTES = 4


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


class LongText(Format):
    """A file whose sections are documents.

    A section ends at a blank line, or at any line if there is no blank line for long.
    """

    mark = "#"

    def scan(self) -> Scan:
        """Read the file. It is rejected if its first section is not text."""
        hasher, cuts, problem = hashlib.sha256(), [], "it is empty"
        start = end = first = 0
        with self.path.open("rb") as stream:
            for number, section in enumerate(self._sections(stream)):
                hasher.update(section)
                if number == 0:
                    problem = _entry(number, section, 0).problem or ""
                end += len(section)
                if end - start >= CUT_BYTES:
                    cuts.append(Cut(start, end, first, end - start))
                    start, first = end, number + 1
        if end > start:
            cuts.append(Cut(start, end, first, end - start))
        return Scan(hasher.hexdigest(), () if problem else tuple(cuts), problem)

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the sections of a cut."""
        with self.path.open("rb") as stream:
            start = stream.seek(cut.start)
            for place, section in enumerate(self._sections(stream), cut.number):
                yield _entry(place, section, start)
                start += len(section)
                if start >= cut.end:
                    break

    def _sections(self, stream: io.BufferedReader) -> Iterator[bytes]:
        target = min(SECTION_BYTES, max(self.size // SMALL_FILE_SECTIONS, 1))
        lines: list[bytes] = []
        size = 0
        while line := _line(stream):
            lines.append(line)
            size += len(line)
            if size >= 4 * target or (size >= target and not line.strip()):
                yield b"".join(lines)
                lines, size = [], 0
        if lines:
            yield b"".join(lines)


def _entry(place: int, content: bytes, start: int) -> Entry:
    try:
        return Entry(place, decode(content, start))
    except NoTextError as error:
        return Entry(place, "", f"not UTF-8 text: {error}")


def _line(stream: io.BufferedReader) -> bytes:
    """Read a line, or up to SECTION_BYTES of a longer line without splitting a character."""
    line = stream.readline(SECTION_BYTES)
    for _ in range(_CHARACTER_BYTES - 1):
        following = b"" if line.endswith(b"\n") else stream.peek(1)[:1]
        if not following or following[0] & 0xC0 != 0x80:  # not inside a character
            break
        line += stream.read(1)
    return line
