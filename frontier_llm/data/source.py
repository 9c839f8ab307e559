"""List the documents of a source in a stable order and with stable names.

A document's split depends only on its name, so adding documents moves no other document to another
split.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.json_lines import CompressedJsonLines, JsonLines
from frontier_llm.data.parquet_files import Parquet
from frontier_llm.data.source_format import Cut, Entry, Format, Scan
from frontier_llm.data.text_files import LongText, WholeText
from frontier_llm.errors import DataError
from frontier_llm.units import MIB

NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
LONG_FILE_BYTES = 4 * MIB
BY_SUFFIX = {
    ".jsonl": JsonLines,
    ".jsonl.gz": CompressedJsonLines,
    ".jsonl.zst": CompressedJsonLines,
    ".parquet": Parquet,
}


@dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    """Stable name: the file's name below the source, and the place of the text in the file."""
    text: str

    def is_validation(self, percent: float) -> bool:
        """Return whether the document is one of the `percent` that are used for validation."""
        return self.falls_in(percent, salt="validation")

    def falls_in(self, percent: float, salt: str) -> bool:
        """Return whether the document is one of `percent` selected by the hash of its name.

        Selections with different salts are independent.
        """
        digest = hashlib.sha256(encode_name(f"{salt}\0{self.name}")).digest()
        return int.from_bytes(digest[:8], "big") < percent / 100 * 2**64


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, with its status when the source was listed."""

    path: Path
    name: str
    """Path below the source, with slashes."""
    size: int
    """Size in bytes."""
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """The files of a corpus, sorted by name."""

    root: Path
    files: tuple[SourceFile, ...]
    text_key: str
    single: bool
    """Whether the source is one file. It must then be text, and is split even if it is small."""

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def folder(self) -> Path:
        """Folder that the names of the files are relative to."""
        return self.root.parent if self.single else self.root

    def fingerprint(self) -> str:
        """Return a digest of names, sizes and times, which is cheap and detects usual changes."""
        hasher = hashlib.sha256(encode_name(str(self.root)))
        for file in self.files:
            hasher.update(encode_name(f"\0{file.name}\0{file.size}\0{file.mtime_ns}"))
        return hasher.hexdigest()

    def digest(self, scans: Sequence[Scan]) -> str:
        """Return a digest of names and contents, given the scans of all files."""
        hasher = hashlib.sha256()
        for file, scan in zip(self.files, scans, strict=True):
            hasher.update(encode_name(f"{file.name}\0{scan.sha256}\0"))
        return hasher.hexdigest()

    def scan(self, index: int) -> Scan:
        """Scan a file.

        Raises:
            DataError: the file cannot be read, or it is the only one and holds no text.
        """
        file = self.files[index]
        try:
            scan = self._format(file).scan()
        except OSError as error:
            raise _unreadable(file.path, error) from error
        if self.single and not scan.cuts:
            raise DataError(
                f"{file.path}: {scan.problem}\n"
                "  do: convert it, or set data.path to another file or folder"
            )
        return scan

    def entries(self, index: int, cut: Cut) -> Iterator[Entry]:
        """Yield the entries of a cut of a file.

        Raises:
            DataError: the file cannot be read.
        """
        file = self.files[index]
        try:
            yield from self._format(file).entries(cut)
        except OSError as error:
            raise _unreadable(file.path, error) from error

    def name(self, index: int, place: int) -> str:
        """Return the name of the document at a place in a file."""
        file = self.files[index]
        mark = self._format(file).mark
        return f"{file.name}{mark}{place}" if mark else file.name

    def _format(self, file: SourceFile) -> Format:
        for suffix, kind in BY_SUFFIX.items():
            if file.name.endswith(suffix):
                return kind(file.path, file.size, self.text_key)
        long = self.single or file.size > LONG_FILE_BYTES
        return (LongText if long else WholeText)(file.path, file.size)


def find_source(corpus: CorpusConfig, config: DataConfig) -> Source:
    """List the files of a corpus without reading them.

    Raises:
        DataError: the path does not exist or holds no text.
    """
    root = _root(corpus)
    try:
        single = root.is_file()
        paths = [root] if single else sorted(_walk(root, stdlib=corpus.kind == "stdlib"))
        below = root.parent if single else root
        files = tuple(_list_file(path, below) for path in paths)
    except OSError as error:
        raise _unreadable(root, error) from error
    source = Source(root, files, config.text_key, single)
    if not source.size:
        raise DataError(f"there is no text in {root}\n  do: set data.path to a file or folder")
    return source


def encode_name(name: str) -> bytes:
    """Encode a file's name, which may contain bytes that are not valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def _root(corpus: CorpusConfig) -> Path:
    if corpus.kind == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    wanted = "do: set data.path to a text, JSONL or Parquet file or a folder of them"
    if corpus.path is None:
        raise DataError(f"no text to read\n  {wanted}")
    root = Path(corpus.path).expanduser().resolve()
    if not root.exists():
        raise DataError(f"there is no {root}\n  {wanted}")
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
