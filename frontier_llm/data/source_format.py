"""Define the interface of the formats of source files.

text_files.py, json_lines.py, csv_files.py and parquet_files.py implement it. A format divides a
file into cuts, and reads the texts of a cut.

- A *cut* is a range of a file that can be read independently, so that several worker processes can
  share a long file. The division into cuts depends only on the file.
- The *place* of a text is its position in the file: the number of its line, row or section. The
  name of a document consists of the file's name and the place.
- An *entry* is what a format finds at a place: a text, or the reason why there is no text.
"""

import hashlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.data.compression import READ_BYTES
from frontier_llm.units import MIB, format_bytes

CUT_BYTES = 4 * MIB
"""A cut ends at the first possible position after this number of bytes."""
LONGEST_DOCUMENT_BYTES = 64 * MIB
"""Largest size of a line, a row or a JSON value. No text that a person wrote is longer. It limits
the memory of a process, which needs several times this size for the longest document."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8, which some programs write at the beginning of a file."""


@dataclass(frozen=True)
class Cut:
    """A range of a file that can be read independently."""

    start: int
    """First byte of the range; in a Parquet file, the first row group."""
    end: int
    """One after the last byte or row group of the range."""
    number: int
    """Place of the first text in the range."""
    size: int
    """Size of the range in bytes. Progress and the size of a worker's part are counted in it."""


@dataclass(frozen=True)
class Scan:
    """Result of reading a file for the first time."""

    sha256: str
    """SHA-256 of the content, in hex."""
    cuts: tuple[Cut, ...]
    """All cuts of the file, in order; empty if the file holds no text."""
    problem: str = "it is empty"
    """Reason why the file holds no text. Has no meaning if there are cuts."""


@dataclass(frozen=True)
class Entry:
    """A text at a place of a file, or the reason why there is none."""

    place: int
    text: str
    problem: str | None = None
    """Reason why the content at this place is not a text; None if it is a text."""
    replaced: int = 0
    """Number of characters that U+FFFD stands for."""


class Format(ABC):
    """Reads a source file of one format, whose texts are under a key or in a column."""

    mark: str
    """Separator between file and place in a document's name; "" if the file is one document."""

    def __init__(self, path: Path, size: int, compression: str, key: str) -> None:
        self.path, self.size, self.compression, self.key = path, size, compression, key

    @abstractmethod
    def scan(self) -> Scan:
        """Return the digest and the cuts of the file.

        Raises:
            OSError: the file cannot be read.
            DataError: the file is not of this format.
        """

    @abstractmethod
    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the entries of a cut in order.

        Raises:
            OSError: the file cannot be read.
            DataError: the file is damaged.
        """


class Undivided(Format):
    """A format whose files are read from the start to the end: the whole file is one cut."""

    mark = ":"
    first = 1
    """Number of the first entry."""

    def scan(self) -> Scan:
        """Digest the file without decompressing or parsing it."""
        cuts = (Cut(0, self.size, self.first, self.size),) if self.size else ()
        return Scan(sha256_of(self.path), cuts)


class Unreadable(Undivided):
    """A file in a format that cannot be read: it is digested, and holds no text."""

    def scan(self) -> Scan:
        """Digest the file."""
        return Scan(sha256_of(self.path), ())

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield nothing."""
        yield from ()


class NoTextError(Exception):
    """Raised if some bytes are not text. The message gives the reason."""


def decode(content: bytes, start: int = 0) -> str:
    """Decode UTF-8, and drop a byte order mark if `start`, the place in the file, is 0.

    Raises:
        NoTextError: the bytes are not UTF-8, or contain a null byte, which marks binary files.
    """
    if start == 0 and content.startswith(BOM):
        content, start = content[len(BOM) :], len(BOM)
    if (position := content.find(b"\0")) >= 0:
        raise NoTextError(f"null byte at byte {start + position}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise NoTextError(f"{error.reason} at byte {start + error.start}") from None


_SURROGATE = re.compile("[\ud800-\udfff]")


_KINDS = {
    "NoneType": "null", "list": "a list", "dict": "an object", "int": "a number",
    "float": "a number", "bool": "true or false", "str": "a text",
}  # fmt: skip


def kind_of(value: object) -> str:
    """Return the type of a value in the words of JSON."""
    return _KINDS.get(type(value).__name__, type(value).__name__)


def text_entry(place: int, value: object, problem: str) -> Entry:
    """Return the entry for a value, whose problem is `problem` if it is not a text.

    Half a surrogate pair, which JSON can express and UTF-8 cannot, becomes U+FFFD.
    """
    if not isinstance(value, str):
        return Entry(place, "", problem)
    text, replaced = value, 0
    if not value.isascii():
        text, replaced = _SURROGATE.subn("\ufffd", value)
    return Entry(place, text, replaced=replaced)


def lines_of(stream: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield the lines of a stream, which end in LF, CR LF or CR; None for a line that is too long.

    A line is too long if it has more than LONGEST_DOCUMENT_BYTES.
    """
    while line := stream.readline(LONGEST_DOCUMENT_BYTES + 1):
        if len(line) > LONGEST_DOCUMENT_BYTES:
            while line and not line.endswith(b"\n"):
                line = stream.readline(READ_BYTES)
            yield None
        elif line.find(b"\r", 0, len(line) - 2) >= 0:
            yield from line.splitlines(keepends=True)
        else:
            yield line


def too_long(unit: str) -> str:
    """Return why a line, a row or an element is not read."""
    return f"this {unit} is longer than {format_bytes(LONGEST_DOCUMENT_BYTES)}: no single document"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
