"""The documents of a source, in a stable order and under stable names.

A document's split depends on its name alone, so adding documents moves none of the others.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.config.data import DataConfig
from frontier_llm.errors import DataError
from frontier_llm.units import KIB, MIB

NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
CHUNK_BYTES = 64 * KIB
LONG_FILE_BYTES = 4 * MIB
CHUNKS_OF_A_SMALL_FILE = 128
READ_BYTES = MIB


@dataclass(frozen=True)
class Document:
    """One text, whole."""

    name: str
    """Stable: the file's name below the source, and the place in it."""
    file: int
    """Index of its file in the source."""
    text: str

    def is_validation(self, percent: float) -> bool:
        """Whether it belongs to the share of `percent` that is kept for validation."""
        return self.falls_in(percent, salt="validation")

    def falls_in(self, percent: float, salt: str) -> bool:
        """Draw a share of all documents; draws with different salts are independent."""
        digest = hashlib.sha256(_encode_name(f"{salt}\0{self.name}")).digest()
        return int.from_bytes(digest[:8], "big") < percent / 100 * 2**64


@dataclass(frozen=True)
class SourceFile:
    """A file, as it was when the source was listed."""

    path: Path
    name: str
    """Below the source, with slashes."""
    size: int
    """Bytes."""
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """The files of a corpus, sorted by name."""

    root: Path
    files: tuple[SourceFile, ...]
    text_key: str
    single: bool
    """Whether the source is one file: then it must be text, and is cut even if it is small."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """Digest names, sizes and times: cheap, and different after any ordinary change."""
        hasher = hashlib.sha256(_encode_name(str(self.root)))
        for file in self.files:
            hasher.update(_encode_name(f"\0{file.name}\0{file.size}\0{file.mtime_ns}"))
        return hasher.hexdigest()

    def digest(self, on_file: Callable[[SourceFile], None] | None = None) -> str:
        """Digest names and contents.

        Raises:
            DataError: a file cannot be read.
        """
        hasher = hashlib.sha256()
        for file in self.files:
            hasher.update(_encode_name(f"{file.name}\0{sha256_of(file.path)}\0"))
            if on_file:
                on_file(file)
        return hasher.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield the documents that hold any text; in a folder, files that are no text have none.

        Raises:
            DataError: a file cannot be read, a JSONL line is wrong, or the one file is no text.
        """
        for index, file in enumerate(self.files):
            try:
                for place, text in self._texts(file):
                    if text:
                        yield Document(f"{file.name}{place}", index, text)
            except UnicodeDecodeError as error:
                if self.single:
                    raise DataError(
                        f"{file.path} is not UTF-8 text: {error}\n"
                        "  do: convert it, or set data.path to another file or folder"
                    ) from error
            except OSError as error:
                raise _unreadable(file.path, error) from error

    def _texts(self, file: SourceFile) -> Iterator[tuple[str, str]]:
        if file.name.endswith(".jsonl"):
            return _jsonl_texts(file.path, self.text_key)
        if self.single or file.size > LONG_FILE_BYTES:
            return _chunks(file)
        return iter([("", _no_null(file.path.read_bytes().decode("utf-8-sig")))])


def find_source(config: DataConfig) -> Source:
    """List the files that a configuration names, without reading them.

    Raises:
        DataError: there is nothing to read.
    """
    root = _root(config)
    try:
        single = root.is_file()
        paths = [root] if single else sorted(_walk(root, stdlib=config.kind == "stdlib"))
        below = root.parent if single else root
        files = tuple(_list_file(path, below) for path in paths)
    except OSError as error:
        raise _unreadable(root, error) from error
    source = Source(root, files, config.text_key, single)
    if not source.size:
        raise DataError(f"there is no text in {root}\n  do: set data.path to a file or folder")
    return source


def sha256_of(path: Path) -> str:
    """Digest a file.

    Raises:
        DataError: it cannot be read.
    """
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(READ_BYTES):
                hasher.update(block)
    except OSError as error:
        raise _unreadable(path, error) from error
    return hasher.hexdigest()


def _encode_name(name: str) -> bytes:
    """Encode a file's name, which may hold bytes that are no text."""
    return name.encode("utf-8", "surrogateescape")


def _root(config: DataConfig) -> Path:
    if config.kind == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    if config.path is None:
        raise DataError("no text to read\n  do: set data.path to a text or JSONL file or a folder")
    root = Path(config.path).expanduser().resolve()
    if not root.exists():
        raise DataError(
            f"there is no {root}\n  do: set data.path to a text or JSONL file or a folder"
        )
    return root


def _walk(root: Path, *, stdlib: bool) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        skipped = NOT_CORPUS if stdlib else set()
        subfolders[:] = [s for s in subfolders if s not in skipped and not s.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and (name.endswith(".py") or not stdlib):
                yield path


def _raise(error: OSError) -> None:
    raise error


def _list_file(path: Path, below: Path) -> SourceFile:
    status = path.stat()
    name = path.relative_to(below).as_posix()
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror or error}\n"
        "  do: make it readable, or set data.path to another file or folder"
    )


def _no_null(text: str) -> str:
    """Refuse a null byte: whatever else decodes, the file is binary."""
    if (place := text.find("\0")) >= 0:
        raise UnicodeDecodeError("utf-8", b"\0", 0, 1, f"null byte at character {place}")
    return text


def _jsonl_texts(path: Path, key: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f":{number}", _field(line, key, f"{path}:{number}")


def _field(line: bytes, key: str, place: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(
            f"{place}: this line is not JSON: {error}\n"
            "  do: mend the line; a .jsonl file holds one object a line"
        ) from error
    if isinstance(record, dict) and isinstance(record.get(key), str):
        # JSON can name half a surrogate pair, which no encoding can write
        return str(record[key]).encode(errors="replace").decode()
    has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    raise DataError(
        f"{place}: no text under the key '{key}' (this line has: {has})\n"
        "  do: set data.text_key to the field that holds the text, or mend the line"
    )


def _chunks(file: SourceFile) -> Iterator[tuple[str, str]]:
    """Cut one long text into documents at blank lines, or at any line where they are rare."""
    target = min(CHUNK_BYTES, max(file.size // CHUNKS_OF_A_SMALL_FILE, 1))
    with file.path.open(encoding="utf-8-sig", newline="") as stream:
        lines: list[str] = []
        size = number = 0
        while line := stream.readline(CHUNK_BYTES):
            lines.append(line)
            size += len(line)
            if size >= 4 * target or (size >= target and not line.strip()):
                yield f"#{number}", _no_null("".join(lines))
                lines, size, number = [], 0, number + 1
        yield f"#{number}", _no_null("".join(lines))
