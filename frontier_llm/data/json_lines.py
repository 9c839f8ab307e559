"""Read JSONL files, plain or compressed: one object per line, with the text under a key."""

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
        """Read the file and find the ends of lines; the lines are not parsed."""
        hasher, cuts = hashlib.sha256(), []
        start = end = 0
        first = number = 1
        with self.path.open("rb") as stream:
            while block := stream.read(READ_BYTES):
                hasher.update(block)
                end += len(block)
                number += block.count(b"\n")
                if end - start >= CUT_BYTES and (newline := block.rfind(b"\n")) >= 0:
                    at = end - len(block) + newline + 1
                    cuts.append(Cut(start, at, first, at - start))
                    start, first = at, number
        if end > start:
            cuts.append(Cut(start, end, first, end - start))
        return Scan(hasher.hexdigest(), tuple(cuts))

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per line of a cut."""
        with self.path.open("rb") as stream:
            left = cut.end - stream.seek(cut.start)
            for number, line in enumerate(stream, cut.number):
                if line.strip():
                    yield self._entry(number, line)
                left -= len(line)
                if left <= 0:
                    break

    def _entry(self, number: int, line: bytes) -> Entry:
        try:
            record = json.loads((line.removeprefix(BOM) if number == 1 else line).decode())
        except UnicodeDecodeError as error:
            return Entry(number, "", f"this line is not UTF-8: {error}")
        except (ValueError, RecursionError) as error:
            return Entry(number, "", f"this line is not JSON: {error}")
        if isinstance(record, dict) and isinstance(text := record.get(self.key), str):
            return Entry(number, _encodable(text))
        has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        return Entry(number, "", f"no text under the key '{self.key}' (this line has: {has})")


class CompressedJsonLines(JsonLines):
    """A JSONL file compressed by gzip or zstandard.

    It has one cut, because it can only be read from its start.
    """

    def scan(self) -> Scan:
        """Digest the compressed file."""
        cuts = (Cut(0, self.size, 1, self.size),) if self.size else ()
        return Scan(sha256_of(self.path), cuts)

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per line of the file."""
        opened = _gzip(self.path) if self.path.suffix == ".gz" else _zstandard(self.path)
        with opened as stream:
            for number, line in enumerate(stream, cut.number):
                if line.strip():
                    yield self._entry(number, line)


def _encodable(text: str) -> str:
    """Replace unpaired surrogates, which JSON can express and UTF-8 cannot, by `?`."""
    return text if text.isascii() else text.encode(errors="replace").decode()


@contextmanager
def _gzip(path: Path) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(path, "rb") as stream:
            yield stream  # type: ignore[misc]  # a GzipFile reads lines of bytes
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from error


@contextmanager
def _zstandard(path: Path) -> Iterator[IO[bytes]]:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"{path}: reading it needs zstandard\n  do: pip install -e '.[formats]'"
        ) from None
    try:
        with path.open("rb") as packed:
            yield io.BufferedReader(_Frames(packed, zstandard.ZstdDecompressor()), READ_BYTES)
    except (EOFError, zstandard.ZstdError) as error:
        raise _damaged(path, error) from error


class _Frames(io.RawIOBase):
    """The content of zstandard frames; unlike the library's stream it detects a truncated end."""

    def __init__(self, packed: IO[bytes], decompressor: Any) -> None:
        self._packed, self._decompressor = packed, decompressor
        self._frame: Any = None
        self._rest, self._plain = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            block = self._rest or self._packed.read(READ_BYTES)
            if not block:
                if self._frame is not None:
                    raise EOFError("the end of the last frame is missing")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._plain, self._rest = self._frame.decompress(block), b""
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged: {error}\n  do: compress it again, or remove it")
