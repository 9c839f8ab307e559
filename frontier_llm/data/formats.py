"""How a file of a source is read: where it can be cut, and which texts it holds.

A *cut* is a stretch of a file that is read by itself, so that one long file keeps many workers
busy. Cuts depend on the file alone. A *place* says where in its file a text stands: the number of
its line, row or piece; with the file's name it makes the name of a document.
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
    """A stretch of a file."""

    start: int
    """Byte, or row group, at which it begins."""
    end: int
    """The same behind its end."""
    number: int
    """Place of its first text."""
    size: int
    """Bytes of the file that it stands for."""


@dataclass(frozen=True)
class Scan:
    """What reading a file once has told."""

    sha256: str
    cuts: tuple[Cut, ...]
    problem: str = "it is empty"
    """Why it holds no text, if it has no cuts."""


@dataclass(frozen=True)
class Entry:
    """What stands at a place: a text, or something that should be one."""

    place: int
    text: str
    problem: str | None = None
    """Why it is no text."""


class Format(ABC):
    """A file, and the way to read it."""

    mark: str
    """Between the name of a file and a place in it."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    @abstractmethod
    def scan(self) -> Scan:
        """Digest the file and cut it.

        Raises:
            OSError: it cannot be read.
            DataError: it is not of this format.
        """

    @abstractmethod
    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield what a cut holds, in order.

        Raises:
            OSError: it cannot be read.
            DataError: it is damaged.
        """


class NoTextError(Exception):
    """Some bytes are no text; says why."""


def decode(content: bytes, start: int = 0) -> str:
    """Decode UTF-8, without a mark of its byte order at the beginning of a file.

    Args:
        content: the bytes.
        start: where they begin in their file, for the message.

    Raises:
        NoTextError: they are no UTF-8, or hold a null byte: whatever else decodes is binary then.
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
    """Digest a file.

    Raises:
        OSError: it cannot be read.
    """
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
