"""Open compressed files. What a file is compressed with is read from its first bytes."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from frontier_llm.errors import DataError
from frontier_llm.units import KIB, MIB

READ_BYTES = MIB
"""Number of bytes that are read at a time."""
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
            f"{path}: reading it needs zstandard\n  do: pip install -e '.[formats]'"
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
