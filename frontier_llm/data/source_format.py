"""Interface of the formats of source files: where a file can be split, and which texts it holds.

A *cut* is a range of a file that can be read independently, so that several workers can share one
long file. Cuts depend only on the file. A *place* is the position of a text in its file: the number
of its line, row or section. A document's name is the file's name and the place.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.units import MIB

CUT_BYTES = 4 * MIB
READ_BYTES = MIB
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Cut:
    """A range of a file that can be read independently."""

    start: int
    """First byte, or first row group."""
    end: int
    """End of the range: one after the last byte or row group."""
    number: int
    """Place of the first text."""
    size: int
    """Size of the range in bytes, for progress and for the size of parts."""


@dataclass(frozen=True)
class Scan:
    """Result of reading a file once."""

    sha256: str
    cuts: tuple[Cut, ...]
    problem: str = "it is empty"
    """Why the file holds no text, if it has no cuts."""


@dataclass(frozen=True)
class Entry:
    """A text at a place of a file, or the reason why there is none."""

    place: int
    text: str
    problem: str | None = None
    """Why the content at this place is not a text; None if it is."""


class Format(ABC):
    """A file of a source in one format."""

    mark: str
    """Separator of file and place in a document's name; "" if the file is one document."""

    def __init__(self, path: Path, size: int) -> None:
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
    """Some bytes are not text; the message is the reason."""


def decode(content: bytes, start: int = 0) -> str:
    """Decode UTF-8 and drop a byte order mark at the beginning of a file.

    Args:
        content: bytes of a file.
        start: offset of `content` in its file in bytes, for the error message.

    Raises:
        NoTextError: the bytes are not UTF-8, or contain a null byte, which marks binary files.
    """
    if start == 0 and content.startswith(BOM):
        content, start = content[len(BOM) :], len(BOM)
    if (place := content.find(b"\0")) >= 0:
        raise NoTextError(f"null byte at byte {start + place}")
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
