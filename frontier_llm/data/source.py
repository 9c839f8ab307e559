"""List the files of a source, the text that a corpus is prepared from, and read their documents.

Documents have a fixed order and fixed names. A document's name alone decides whether the document
is used for training or for validation, so adding documents does not move any other document.
"""

import hashlib
import stat
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.corpus_account import Tally
from frontier_llm.data.file_formats import Detected, reader_of
from frontier_llm.data.source_format import Cut, Entry, Format, Scan
from frontier_llm.data.source_listing import Listing, list_folder, list_stdlib
from frontier_llm.errors import DataError

_SHOWN_PROBLEMS = 5
"""Number of files that an error names."""
_FIRST_FORMATS = {
    ".jsonl": ("jsonl", ""),
    ".jsonl.gz": ("jsonl", "gzip"),
    ".jsonl.zst": ("jsonl", "zstandard"),
    ".parquet": ("parquet", ""),
}
"""Format and compression by suffix, from the time when the name alone told them. The digest of a
source does not contain them, so corpora of that time are found."""


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
        return self._number(salt) < percent / 100 * 2**64

    def validation_from(self) -> float:
        """Return the percentage above which the document is for validation."""
        return self._number("validation") * 100 / 2**64

    def _number(self, salt: str) -> int:
        """Return a pseudo-random number below 2**64."""
        digest = hashlib.sha256(encode_name(f"{salt}\0{self.name}")).digest()
        return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, with its size and time when the source was listed."""

    path: Path
    name: str
    """Path relative to the source folder, with slashes."""
    size: int
    """Size in bytes."""
    mtime_ns: int
    detected: Detected = field(default_factory=Detected)
    """Format of the file (source_choice.py)."""


@dataclass(frozen=True)
class Source:
    """The files of a corpus, sorted by name."""

    root: Path
    files: tuple[SourceFile, ...]
    text_key: str
    """Key (JSONL) or column (Parquet) that holds the text."""
    single: bool
    """Whether the source is a single file, which must be text."""
    left_out: Mapping[str, Tally] = field(default_factory=dict)
    """Files that are not read, by reason."""
    divided: bool = False
    """Whether small files of text are divided into several documents, too, so that there are some
    for training and some for validation (source_choice.py)."""

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
            hasher.update(encode_name(f"{file.name}\0{scan.sha256}\0{_marks(file)}"))
        return hasher.hexdigest()

    def refuse(self, problems: Sequence[str], advice: str) -> None:
        """Raise a DataError that names the first of the paths with problems, if there are any."""
        if problems:
            names = "\n".join(f"  {line}" for line in problems[:_SHOWN_PROBLEMS])
            raise DataError(
                f"{len(problems):,} of the files in {self.root} cannot be used:\n{names}\n"
                f"  do: {advice}, or leave such files out and count them with data.broken=skip"
            )

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
        """Return the reader of a file."""
        return reader_of(file.path, file.size, file.detected, self.text_key, divided=self.divided)


def find_source(corpus: CorpusConfig, config: DataConfig) -> Source:
    """List the files of a corpus without reading them.

    Raises:
        DataError: the path does not exist or holds no text, or a file in it cannot be read.
    """
    root = _root(corpus)
    single = root.is_file()
    if corpus.kind == "stdlib":
        listing = list_stdlib(root)
    else:
        listing = Listing(root, [root]) if single else list_folder(root)
    folder, files = root.parent if single else root, []
    for path in listing.paths:
        name = path.relative_to(folder).as_posix()
        try:
            status = path.stat()
        except OSError as error:
            listing.leave_out_broken(name, error.strerror or str(error))
        else:
            files.append(SourceFile(path, name, status.st_size, status.st_mtime_ns))
    source = Source(root, tuple(files), config.text_key, single, listing.left_out)
    if config.broken == "refuse":
        source.refuse(listing.broken, "restore or remove them")
    if not source.size:
        raise DataError(f"there is no text in {root}\n  do: set data.path to one with text")
    return source


def _marks(file: SourceFile) -> str:
    """Return what the digest of a source contains of a file beside its name and content."""
    suffixes = (suffix for suffix in _FIRST_FORMATS if file.name.endswith(suffix))
    first = _FIRST_FORMATS.get(next(suffixes, ""), ("text", ""))
    detected = file.detected
    if (detected.format, detected.compression) == first or detected.is_binary:
        return ""
    return f"{detected.format}\0{detected.compression}\0"


def encode_name(name: str) -> bytes:
    """Return the bytes of a file's name, which need not be valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def _root(corpus: CorpusConfig) -> Path:
    """Return the path of the file or folder that a corpus is prepared from."""
    if {"stdlib": True, "text": False}[corpus.kind]:
        return Path(sysconfig.get_path("stdlib"))
    advice = "do: set data.path to a file of text, JSON lines, Parquet or CSV, or a folder of them"
    if corpus.path is None:
        raise DataError(f"no text to read\n  {advice}")
    # links are not resolved: the name that the user typed tells the format
    root = Path(corpus.path).expanduser().absolute()
    try:
        mode = root.stat().st_mode
    except OSError as error:
        target = f", a link to {root.readlink()}" if root.is_symlink() else ""
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        problem = "" if is_absent and not target else f": {error.strerror or error}"
        what = f"there is no {root}" if is_absent else f"cannot read {root}"
        raise DataError(f"{what}{target}{problem}\n  {advice}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(f"{root} is a pipe, a socket or a device\n  {advice}")
    return root


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror or error}\n"
        "  do: make it readable, or set data.path to another file or folder"
    )
