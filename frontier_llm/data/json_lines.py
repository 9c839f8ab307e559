"""Read JSONL files, plain or compressed: one JSON object per line, with the text under a key.

The classes implement the interface of data/source_format.py: `scan` finds the *cuts*, the ranges
of a file that workers can read independently, and `entries` yields the texts of one cut.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from frontier_llm.data.source_format import (
    BOM,
    CUT_BYTES,
    READ_BYTES,
    Cut,
    Entry,
    Format,
    Scan,
    sha256_of,
)
from frontier_llm.errors import DataError


class JsonLines(Format):
    """A JSONL file: each line that is not blank is a document."""

    mark = ":"

    def __init__(self, path: Path, size: int, key: str) -> None:
        super().__init__(path, size)
        self.key = key

    def scan(self) -> Scan:
        """Digest the file and divide it into cuts between lines. The lines are not parsed."""
        hasher, cuts = hashlib.sha256(), []
        cut_start = position = 0
        cut_line = line = 1
        with self.path.open("rb") as stream:
            while block := stream.read(READ_BYTES):
                hasher.update(block)
                position += len(block)
                line += block.count(b"\n")
                if position - cut_start >= CUT_BYTES and (newline := block.rfind(b"\n")) >= 0:
                    cut_end = position - len(block) + newline + 1
                    cuts.append(Cut(cut_start, cut_end, cut_line, cut_end - cut_start))
                    cut_start, cut_line = cut_end, line
        if position > cut_start:
            cuts.append(Cut(cut_start, position, cut_line, position - cut_start))
        return Scan(hasher.hexdigest(), tuple(cuts))

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per line of a cut that is not blank."""
        with self.path.open("rb") as stream:
            remaining_bytes = cut.end - stream.seek(cut.start)
            for number, line in enumerate(stream, cut.number):
                if line.strip():
                    yield self._entry(number, line)
                remaining_bytes -= len(line)
                if remaining_bytes <= 0:
                    break

    def _entry(self, number: int, line: bytes) -> Entry:
        try:
            record = json.loads((line.removeprefix(BOM) if number == 1 else line).decode())
        except UnicodeDecodeError as error:
            return Entry(number, "", f"this line is not UTF-8: {error}")
        except (ValueError, RecursionError) as error:
            return Entry(number, "", f"this line is not JSON: {error}")
        if isinstance(record, dict) and isinstance(text := record.get(self.key), str):
            return Entry(number, _replace_surrogates(text))
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        return Entry(number, "", f"no text under the key '{self.key}' (this line has: {keys})")


class CompressedJsonLines(JsonLines):
    """A JSONL file compressed by gzip or zstandard.

    It has a single cut, because it can only be read from its start.
    """

    def scan(self) -> Scan:
        """Digest the compressed file without decompressing it."""
        cuts = (Cut(0, self.size, 1, self.size),) if self.size else ()
        return Scan(sha256_of(self.path), cuts)

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per line of the file that is not blank."""
        is_gzip = self.path.suffix == ".gz"
        with _open_gzip(self.path) if is_gzip else _open_zstandard(self.path) as stream:
            for number, line in enumerate(stream, cut.number):
                if line.strip():
                    yield self._entry(number, line)


def _replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which JSON can express and UTF-8 cannot, by `?`."""
    return text if text.isascii() else text.encode(errors="replace").decode()


@contextmanager
def _open_gzip(path: Path) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(path, "rb") as stream:
            yield stream  # type: ignore[misc]  # a GzipFile reads lines of bytes
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from error


@contextmanager
def _open_zstandard(path: Path) -> Iterator[IO[bytes]]:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"{path}: reading it needs zstandard\n  do: pip install -e '.[formats]'"
        ) from None
    try:
        with path.open("rb") as packed:
            frames = _ZstandardFrames(packed, zstandard.ZstdDecompressor())
            yield io.BufferedReader(frames, READ_BYTES)
    except (EOFError, zstandard.ZstdError) as error:
        raise _damaged(path, error) from error


class _ZstandardFrames(io.RawIOBase):
    """Decompresses a series of zstandard frames.

    Unlike the library's own stream, this class detects that the end of the last frame is missing.
    """

    def __init__(self, packed: IO[bytes], decompressor: Any) -> None:
        self._packed, self._decompressor = packed, decompressor
        self._frame: Any = None  # decompressor of the current frame
        self._unread = b""  # compressed bytes after the end of the previous frame
        self._plain = b""  # decompressed bytes that nobody has asked for yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            block = self._unread or self._packed.read(READ_BYTES)
            if not block:
                if self._frame is not None:
                    raise EOFError("the end of the last frame is missing")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._plain, self._unread = self._frame.decompress(block), b""
            if self._frame.eof:
                self._unread, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged: {error}\n  do: compress it again, or remove it")
