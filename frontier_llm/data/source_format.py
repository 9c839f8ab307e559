"""Define the interface of the formats of source files, and open compressed files.

file_readers.py implements it. A format divides a file into cuts, and reads the
texts of a cut. What a file is compressed with is read from its first bytes.

- A *cut* is a range of a file that can be read independently, so that several worker processes can
  share a long file. The division into cuts depends only on the file.
- The *place* of a text is its position in the file: the number of its line, row or section. The
  name of a document consists of the file's name and the place.
- An *entry* is what a format finds at a place: a text, or the reason why there is no text.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from frontier_llm.errors import DataError, install_command
from frontier_llm.units import KIB, MIB, format_bytes

READ_BYTES = MIB
_ZSTANDARD_BYTES = 4 * KIB
"""Number of compressed bytes that are decompressed at a time. One of them can stand for 32 KiB."""
SUFFIXES = {".gz": "gzip", ".zst": "zstandard", ".bz2": "bzip2", ".xz": "xz"}
"""Name of each compression, by the suffix of a file."""
_FIRST_BYTES = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
}
CUT_BYTES = 4 * MIB
"""A cut ends at the first possible position after this number of bytes."""
LONGEST_DOCUMENT_BYTES = 64 * MIB
"""Largest size of a line, a row or a JSON value. No text that a person wrote is longer. It limits
the memory of a process, which needs several times this size for the longest document."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8, which some programs write at the beginning of a file."""
END_MARKS = ("<|endoftext|>", "<|end_of_text|>")
"""What ends a document in files of text that hold many, such as those of TinyStories."""
_UTF_16_NULLS, _UTF_16_SHARE = 4, 1 / 16
"""Fewest null bytes that suggest UTF-16, and their smallest share: random bytes have 1/256. Spaces
and line ends have one each in every language."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS = {
    "NoneType": "null", "list": "a list", "dict": "an object", "int": "a number",
    "float": "a number", "bool": "true or false", "str": "a text",
}  # fmt: skip


def compression_of(head: bytes) -> str:
    """Return what a file that begins with `head` is compressed with; "" if it is not."""
    return next((name for magic, name in _FIRST_BYTES.items() if head.startswith(magic)), "")


@contextmanager
def open_plain(path: Path, compression: str) -> Iterator[io.BufferedReader]:
    """Open a file and decompress it while it is read."""
    with path.open("rb") as packed:
        if not compression:
            yield packed
            return
        try:
            yield io.BufferedReader(_decompressed(path, packed, compression), READ_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
            raise _damaged(path, error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise _damaged(path, error) from error  # bz2 raises an OSError without a number


def _decompressed(path: Path, packed: IO[bytes], compression: str) -> Any:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=packed)
    if compression == "bzip2":
        return bz2.BZ2File(packed)
    if compression == "xz":
        return lzma.LZMAFile(packed)
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"{path}: reading it needs zstandard\n  do: {install_command('formats')}"
        ) from None
    return _ZstandardFrames(packed, zstandard)


class _ZstandardFrames(io.RawIOBase):
    """Decompresses a series of zstandard frames.

    Unlike the library's own stream, this class detects that the end of the last frame is missing.
    """

    def __init__(self, packed: IO[bytes], library: Any) -> None:
        self._packed, self._library = packed, library
        self._decompressor = library.ZstdDecompressor()
        self._frame: Any = None  # decompressor of the current frame
        self._unread = b""  # compressed bytes after the end of the previous frame
        self._plain = b""  # decompressed bytes that nobody has asked for yet
        self._position = 0  # number of these bytes that were returned

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._position == len(self._plain):
            block = self._unread or self._packed.read(_ZSTANDARD_BYTES)
            if not block:
                if self._frame is not None:
                    raise EOFError("the end of the last frame is missing")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._plain, self._unread = self._frame.decompress(block), b""
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
            self._position = 0
            if self._frame.eof:
                self._unread, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._plain) - self._position)
        buffer[:count] = self._plain[self._position : self._position + count]
        self._position += count
        return count


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged: {error}\n  do: compress it again, or remove it")


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
        """Return the digest and the cuts of the file."""

    @abstractmethod
    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the entries of a cut in order."""


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

    Raises a NoTextError if the bytes are not UTF-8, or contain a null byte, which marks binary
    files.
    """
    if start == 0 and content.startswith(BOM):
        content, start = content[len(BOM) :], len(BOM)
    if (position := content.find(b"\0")) >= 0:
        hint = _utf_16_hint(content[: 4 * KIB], start)
        raise NoTextError(f"null byte at byte {start + position}{hint}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise NoTextError(f"{error.reason} at byte {start + error.start}") from None


def _utf_16_hint(head: bytes, start: int) -> str:
    """Say if all null bytes are the first, or all the second, of the bytes of a character."""
    nulls = {(start + place) % 2 for place, byte in enumerate(head) if byte == 0}
    if len(nulls) > 1 or head.count(0) < max(_UTF_16_NULLS, _UTF_16_SHARE * len(head)):
        return ""
    return f"; it may be UTF-16 (iconv -f UTF-16{'LE' if nulls == {1} else 'BE'} -t utf-8)"


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
    """Yield the lines of a stream, which end in LF, CR LF or CR; None for too long a line."""
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
