"""Plain text: a short file is one document, a long one is cut into many."""

import hashlib
import io
from collections.abc import Iterator

from frontier_llm.data.formats import CUT_BYTES, Cut, Entry, Format, NoTextError, Scan, decode
from frontier_llm.units import KIB

PIECE_BYTES = 64 * KIB
PIECES_OF_A_SMALL_FILE = 128
_CHARACTER_BYTES = 4


class WholeText(Format):
    """One document."""

    mark = ""

    def scan(self) -> Scan:
        """Read all of it."""
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
        """Yield the text."""
        yield _entry(cut.number, self.path.read_bytes(), cut.start)


class LongText(Format):
    """Documents that end at blank lines, or at any line where blank ones are rare."""

    mark = "#"

    def scan(self) -> Scan:
        """Read all of it; what does not begin as text is none."""
        hasher, cuts, problem = hashlib.sha256(), [], "it is empty"
        start = end = first = 0
        with self.path.open("rb") as stream:
            for number, piece in enumerate(self._pieces(stream)):
                hasher.update(piece)
                if number == 0:
                    problem = _entry(number, piece, 0).problem or ""
                end += len(piece)
                if end - start >= CUT_BYTES:
                    cuts.append(Cut(start, end, first, end - start))
                    start, first = end, number + 1
        if end > start:
            cuts.append(Cut(start, end, first, end - start))
        return Scan(hasher.hexdigest(), () if problem else tuple(cuts), problem)

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the pieces of a cut."""
        with self.path.open("rb") as stream:
            start = stream.seek(cut.start)
            for place, piece in enumerate(self._pieces(stream), cut.number):
                yield _entry(place, piece, start)
                start += len(piece)
                if start >= cut.end:
                    break

    def _pieces(self, stream: io.BufferedReader) -> Iterator[bytes]:
        target = min(PIECE_BYTES, max(self.size // PIECES_OF_A_SMALL_FILE, 1))
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
    """Read a line; of a very long one a part that ends with a character."""
    line = stream.readline(PIECE_BYTES)
    for _ in range(_CHARACTER_BYTES - 1):
        following = b"" if line.endswith(b"\n") else stream.peek(1)[:1]
        if not following or following[0] & 0xC0 != 0x80:  # not within a character
            break
        line += stream.read(1)
    return line
