"""Define the interface of the formats of source files.

text_files.py, json_lines.py and parquet_files.py implement it. A format divides a file into cuts,
and reads the texts of a cut.

- A *cut* is a range of a file that can be read independently, so that several worker processes can
  share a long file. The division into cuts depends only on the file.
- The *place* of a text is its position in the file: the number of its line, row or section. The
  name of a document consists of the file's name and the place.
- An *entry* is what a format finds at a place: a text, or the reason why there is no text.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.units import MIB

CUT_BYTES = 4 * MIB
"""A cut ends at the first possible position after this number of bytes."""
READ_BYTES = MIB
"""Number of bytes that are read at a time."""
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


class Format(ABC):
    """Reads a source file of one format."""

    mark: str
    """Separator between file and place in a document's name; "" if the file is one document."""

    def __init__(self, path: Path, size: int) -> None:
        """Initialise the reader.

        Args:
            path: path of the file.
            size: size of the file in bytes.
        """
        self.path, self.size = path, size

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


class NoTextError(Exception):
    """Raised if some bytes are not text. The message gives the reason."""


def decode(content: bytes, start: int = 0) -> str:
    """Decode UTF-8 and drop a byte order mark at the beginning of a file.

    Args:
        content: bytes of a file, or a section of it.
        start: offset of `content` in the file in bytes.

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


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
