"""List the files of a source, the text that a corpus is prepared from, and read their documents.

Documents have a fixed order and fixed names. A document's name alone decides whether the document
is used for training or for validation, so adding documents does not move any other document.
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

STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Names of folders that `data=stdlib` skips."""
LONG_FILE_BYTES = 4 * MIB
"""A plain text file of more bytes is divided into several documents."""
FORMATS = {
    ".jsonl": JsonLines,
    ".jsonl.gz": CompressedJsonLines,
    ".jsonl.zst": CompressedJsonLines,
    ".parquet": Parquet,
}


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    name: str
    """Path of the file relative to the source folder, and the number of the line, row or section in
    the file."""
    text: str

    def is_validation(self, percent: float) -> bool:
        """Return whether the document is for validation, as `percent` of all documents are."""
        return self.falls_in(percent, salt="validation")

    def falls_in(self, percent: float, salt: str) -> bool:
        """Return whether the document is in a pseudo-random selection of `percent` of all.

        The hash of the document's name decides. Selections with different salts are independent.
        """
        digest = hashlib.sha256(encode_name(f"{salt}\0{self.name}")).digest()
        return int.from_bytes(digest[:8], "big") < percent / 100 * 2**64


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, with its size and time when the source was listed."""

    path: Path
    name: str
    """Path relative to the source folder, with slashes."""
    size: int
    """Size in bytes."""
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """The files of a corpus, sorted by name."""

    root: Path
    files: tuple[SourceFile, ...]
    text_key: str
    """Key (JSONL) or column (Parquet) that holds the text."""
    single: bool
    """Whether the source is a single file. Such a file must be text, and it is divided into several
    documents even if it is small, so that there are some for validation."""

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def folder(self) -> Path:
        """Folder that the names of the files are relative to."""
        return self.root.parent if self.single else self.root

    def fingerprint(self) -> str:
        """Return a digest of the names, sizes and times of all files, without reading them."""
        hasher = hashlib.sha256(encode_name(str(self.root)))
        for file in self.files:
            hasher.update(encode_name(f"\0{file.name}\0{file.size}\0{file.mtime_ns}"))
        return hasher.hexdigest()

    def digest(self, scans: Sequence[Scan]) -> str:
        """Return a digest of the names and contents of all files.

        Args:
            scans: results of `scan` for all files, which hold the digests of their contents.
        """
        hasher = hashlib.sha256()
        for file, scan in zip(self.files, scans, strict=True):
            hasher.update(encode_name(f"{file.name}\0{scan.sha256}\0"))
        return hasher.hexdigest()

    def scan(self, index: int) -> Scan:
        """Read file number `index`; return its digest and the cuts, where it can be divided.

        Raises:
            DataError: the file cannot be read, or it is the only file and holds no text.
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
        """Yield the entries (lines, rows or sections) in a cut of file number `index`.

        Raises:
            DataError: the file cannot be read.
        """
        file = self.files[index]
        try:
            yield from self._format(file).entries(cut)
        except OSError as error:
            raise _unreadable(file.path, error) from error

    def name(self, index: int, place: int) -> str:
        """Return the name of a document.

        Args:
            index: index of its file.
            place: number of its line, row or section in the file.
        """
        file = self.files[index]
        mark = self._format(file).mark
        return f"{file.name}{mark}{place}" if mark else file.name

    def _format(self, file: SourceFile) -> Format:
        """Return the reader for the format of a file, which its name determines."""
        long = self.single or file.size > LONG_FILE_BYTES
        return reader_of(file.path, file.size, self.text_key, LongText if long else WholeText)


def reader_of(
    path: Path, size: int, text_key: str, plain: type[LongText | WholeText] = WholeText
) -> Format:
    """Return the reader for the format of a file, which its name determines.

    Args:
        path: path of the file.
        size: size of the file in bytes.
        text_key: key (JSONL) or column (Parquet) that holds the text.
        plain: reader of files in none of these formats.
    """
    for suffix, reader in FORMATS.items():
        if path.name.endswith(suffix):
            return reader(path, size, text_key)
    return plain(path, size)


def find_source(corpus: CorpusConfig, config: DataConfig) -> Source:
    """List the files of a corpus without reading them.

    Raises:
        DataError: the path does not exist or holds no text.
    """
    root = _root(corpus)
    try:
        single = root.is_file()
        paths = [root] if single else sorted(_walk(root, stdlib=corpus.kind == "stdlib"))
        folder = root.parent if single else root
        files = tuple(_list_file(path, folder) for path in paths)
    except OSError as error:
        raise _unreadable(root, error) from error
    source = Source(root, files, config.text_key, single)
    if not source.size:
        raise DataError(f"there is no text in {root}\n  do: set data.path to a file or folder")
    return source


def encode_name(name: str) -> bytes:
    """Return the bytes of a file's name, which need not be valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def _root(corpus: CorpusConfig) -> Path:
    """Return the path of the file or folder that a corpus is prepared from."""
    if {"stdlib": True, "text": False}[corpus.kind]:
        return Path(sysconfig.get_path("stdlib"))
    advice = "do: set data.path to a text, JSONL or Parquet file or a folder of them"
    if corpus.path is None:
        raise DataError(f"no text to read\n  {advice}")
    root = Path(corpus.path).expanduser().resolve()
    if not root.exists():
        raise DataError(f"there is no {root}\n  {advice}")
    return root


def _walk(root: Path, *, stdlib: bool) -> Iterator[Path]:
    """Yield all files in a folder that are not hidden; of the standard library only its sources."""
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        skipped = STDLIB_EXCLUDED if stdlib else set()
        subfolders[:] = [s for s in subfolders if s not in skipped and not s.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and (name.endswith(".py") or not stdlib):
                yield path


def _raise(error: OSError) -> None:
    raise error


def _list_file(path: Path, folder: Path) -> SourceFile:
    status = path.stat()
    name = path.relative_to(folder).as_posix()
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror or error}\n"
        "  do: make it readable, or set data.path to another file or folder"
    )
