"""List the files of a source, the text that a corpus is prepared from, and read their documents.

Links are followed once. A folder or a file to which several paths lead is listed once. Files are
told apart by their real paths, because file systems of clusters may give equal inode numbers to
different files.

Folders that this program has written (runs, sweeps, checkpoints, exported models and prepared
corpora) are not entered, so they may lie in the folder that a run reads. Their own files tell what
they are.

Documents have a fixed order and fixed names. A document's name alone decides whether the document
is used for training or for validation, so adding documents does not move any other document.
"""

import hashlib
import os
import re
import stat
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from frontier_llm.config.data import CORPUS_FILES, CorpusConfig, DataConfig
from frontier_llm.data.corpus_manifest import BROKEN, HIDDEN, OWN, REPEATED, Tally
from frontier_llm.data.file_formats import Detected, claim_of, reader_of
from frontier_llm.data.source_format import Cut, Entry, Format, Scan
from frontier_llm.errors import DataError


class NoSourceError(DataError):
    """There is no text to read where `data.path` says."""


STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SHOWN_PROBLEMS = 5
_OWN_FILES = (
    ("a run directory", {"config.yaml", "config.yaml.sha256"}),
    ("a run directory", {".lock", "failures"}),
    ("a folder of trials", {"multirun.yaml"}),
    ("a trial", {"trial.json", "run"}),
    ("a prepared corpus", {*CORPUS_FILES}),
    ("a model", {"config.json", "model.safetensors"}),
    ("a model", {"config.json", "model.safetensors.index.json"}),
)
"""Names that together tell that this program has written a folder. A run that has failed before it
began may have no config.yaml."""
_RANK_FILE = re.compile(r"ranks?_(from_)?\d{5}\.safetensors")
"""Name of a file of a checkpoint."""
_SHARED_TOKENIZER = re.compile(r".+-[0-9a-f]{12}\.model")
"""Name of the tokenizer of a blend (prepare.py), which lies beside its prepared corpora."""
_FIRST_FORMATS = {
    ".jsonl": ("jsonl", ""),
    ".jsonl.gz": ("jsonl", "gzip"),
    ".jsonl.zst": ("jsonl", "zstandard"),
    ".parquet": ("parquet", ""),
}
"""Format and compression by suffix, from the time when the name alone told them. The digest of a
source does not contain them, so corpora of that time are found."""


@dataclass
class Listing:
    """Files of a folder: those to read, in order, and by reason those that are left out.

    `broken` are paths that cannot be read, with the reasons.
    """

    root: Path
    paths: list[Path] = field(default_factory=list)
    left_out: dict[str, Tally] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def leave_out(self, reason: str, name: str, size: int) -> None:
        """Count a file that is not read."""
        self.left_out.setdefault(reason, Tally()).add(name, size)

    def leave_out_broken(self, name: str, problem: str) -> None:
        """Count a path that cannot be read."""
        self.leave_out(BROKEN, f"{name} ({problem})", 0)
        self.broken.append(f"{self.root / name}: {problem}")


def own_folder(names: Collection[str]) -> str | None:
    """Return what a folder with these files is if this program has written it, otherwise None."""
    if any(map(_RANK_FILE.fullmatch, names)):
        return "a checkpoint"
    return next((what for what, own in _OWN_FILES if own.issubset(names)), None)


def list_stdlib(root: Path) -> Listing:
    """List the sources of the standard library, without its tests."""
    listing = Listing(root)
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in STDLIB_EXCLUDED and s[0] != "."]
        paths = [Path(folder, name) for name in names if name.endswith(".py") and name[0] != "."]
        listing.paths += [path for path in paths if path.is_file()]
    listing.paths.sort()
    return listing


class _Lister:
    """One walk through a folder. Links are followed after all folders without links.

    `run` raises a DataError if this program has written the folder itself.
    """

    def __init__(self, root: Path) -> None:
        self.listing = Listing(root)
        self._root = root
        self._folders: set[str] = set()  # real paths of the folders that were walked
        self._files: dict[str, list[tuple[Path, int]]] = {}  # paths and sizes by real path
        self._links: list[Path] = []  # links to folders

    def run(self) -> Listing:
        """List all files in the folder and in the folders that it links to."""
        self._walk(self._root)
        while self._links:
            links, self._links = sorted(self._links), []
            for link in links:
                self._follow(link)
        self._choose()
        return self.listing

    def _follow(self, link: Path) -> None:
        target = os.path.realpath(link)
        # a link to a folder that holds the link would add what is beside the source
        holder = os.path.realpath(link.parent)
        if target in self._folders or Path(holder).is_relative_to(target):
            self.listing.leave_out(REPEATED, f"{self._name(link)} (a link to {target})", 0)
        else:
            self._walk(link)

    def _walk(self, top: Path) -> None:
        """Sort the entries of a folder and its subfolders, without following links.

        What begins with a dot is hidden, and so are Python's caches.
        """
        waiting = [(top, False)]
        while waiting:
            folder, is_hidden = waiting.pop()
            real = os.path.realpath(folder)
            if not is_hidden:
                if real in self._folders:  # a folder of a linked folder that was walked before
                    self.listing.leave_out(REPEATED, f"{self._name(folder)} (also {real})", 0)
                    continue
                self._folders.add(real)
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError as error:
                self.listing.leave_out_broken(self._name(folder), error.strerror or str(error))
                continue
            if not is_hidden and (own := own_folder([entry.name for entry in entries])):
                self._leave_out_own(folder, own)
                continue
            for entry in entries:
                path = folder / entry.name
                hides = is_hidden or entry.name.startswith(".") or entry.name == "__pycache__"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((path, hides))
                else:
                    target = path if entry.is_symlink() else Path(real, entry.name)
                    self._sort(path, target, hides)

    def _leave_out_own(self, folder: Path, own: str) -> None:
        """Count a folder of this program, whose files change while a run lasts; refuse the root."""
        if folder != self._root:
            self.listing.leave_out(OWN, f"{self._name(folder)} ({own})", 0)
            return
        raise DataError(
            f"{folder} is {own}, which is no text to train on\n"
            "  do: set data.path to a file or folder of text"
        )

    def _sort(self, path: Path, target: Path, hidden: bool) -> None:
        """Put a path that is no folder into one of the lists."""
        try:
            status = path.lstat() if hidden else path.stat()
        except OSError as error:
            problem = error.strerror or str(error)
            if path.is_symlink():
                problem = f"a link to {path.readlink()}: {problem}"
            self.listing.leave_out_broken(self._name(path), problem)
            return
        if hidden:
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            self.listing.leave_out(HIDDEN, self._name(path), size)
        elif stat.S_ISDIR(status.st_mode):
            self._links.append(path)
        elif _SHARED_TOKENIZER.fullmatch(path.name):
            self.listing.leave_out(OWN, self._name(path), status.st_size)
        elif stat.S_ISREG(status.st_mode):
            real = os.path.realpath(target) if target == path else str(target)
            self._files.setdefault(real, []).append((path, status.st_size))
        else:
            self.listing.leave_out_broken(self._name(path), "a pipe, a socket or a device")

    def _choose(self) -> None:
        """Choose one of the paths to each file: one whose name says a format, rather no link."""
        for paths in self._files.values():
            (first, _), *others = sorted(paths, key=_preference)
            self.listing.paths.append(first)
            for other, size in others:
                name = f"{self._name(other)} (read as {self._name(first)})"
                self.listing.leave_out(REPEATED, name, size)
        self.listing.paths.sort()

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _preference(file: tuple[Path, int]) -> tuple[bool, bool, Path]:
    path, _ = file
    return claim_of(path.name)[0] is None, path.is_symlink(), path


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
        digest = hashlib.sha256(encode_name(f"{salt}\0{self.name}")).digest()
        return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, with its size and time when the source was listed."""

    path: Path
    name: str
    """Path relative to the source folder, with slashes."""
    size: int
    mtime_ns: int
    detected: Detected = field(default_factory=Detected)

    def change(self) -> str | None:
        """Return what the file was and what it is now; None if it is as it was listed."""
        was, now = (self.size, self.mtime_ns), None
        with suppress(OSError):
            status = self.path.stat()
            now = status.st_size, status.st_mtime_ns
        state = "gone" if now is None else _state(*now)
        return None if now == was else f"{self.path}: it was {_state(*was)}, and is {state}"


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
    broken: tuple[str, ...] = ()
    """Paths that cannot be read and must not be left out, with the reasons."""
    divided_from: int | None = None
    """Size in bytes from which short texts, too, are divided into several documents, so that there
    are some for training and some for validation (source_choice.py)."""
    is_prepared: bool = False
    """Whether the root is a prepared corpus, which has no files to read text from."""

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
        """Return a digest of the names of all files, and of their contents, which scans digest."""
        hasher = hashlib.sha256()
        for file, scan in zip(self.files, scans, strict=True):
            hasher.update(encode_name(f"{file.name}\0{scan.sha256}\0{_marks(file)}"))
        if self.divided_from:  # the other ways to divide follow from the files
            hasher.update(f"divided from {self.divided_from}".encode())
        return hasher.hexdigest()

    def refuse(self, problems: Sequence[str], advice: str) -> None:
        """Raise a DataError that names the first of the paths with problems, if there are any."""
        if problems:
            raise DataError(
                f"{len(problems):,} of the files in {self.root} cannot be used:\n"
                f"{first_lines(problems)}\n"
                f"  do: {advice}, or leave such files out and count them with data.broken=skip"
            )

    def refuse_broken(self) -> None:
        """Raise a DataError if some paths cannot be read and must not be left out."""
        self.refuse(self.broken, "restore or remove them")

    def refuse_changed(self, indices: Iterable[int]) -> None:
        """Raise a DataError if files with these numbers were written to since they were listed."""
        if changes := [change for index in indices if (change := self.files[index].change())]:
            raise DataError(
                f"the text changed while a corpus was prepared:\n{first_lines(changes)}\n"
                "  do: start again when nothing writes to it; keep logs in another folder"
            )

    def scan(self, index: int) -> Scan:
        """Read file number `index`; return its digest and the cuts, where it can be divided."""
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
        """Yield the entries (lines, rows or sections) in a cut of file number `index`."""
        file = self.files[index]
        try:
            yield from self._format(file).entries(cut)
        except OSError as error:
            raise _unreadable(file.path, error) from error

    def name(self, index: int, place: int) -> str:
        """Return the name of a document; its place is the number of its line, row or section."""
        file = self.files[index]
        mark = self._format(file).mark
        return f"{file.name}{mark}{place}" if mark else file.name

    def _format(self, file: SourceFile) -> Format:
        divided = self.divided_from is not None and file.size >= self.divided_from
        return reader_of(file.path, file.size, file.detected, self.text_key, divided=divided)


def find_source(corpus: CorpusConfig, config: DataConfig) -> Source:
    """List the files of a corpus without reading them.

    Raises a DataError if the path does not exist, holds no text, or is a folder of this program.
    """
    config = config.of(corpus)
    root = _root(corpus)
    if corpus.is_prepared:
        return Source(root, (), config.text_key, single=False, is_prepared=True)
    single = root.is_file()
    if corpus.kind == "stdlib":
        listing = list_stdlib(root)
    else:
        listing = Listing(root, [root]) if single else _Lister(root).run()
    folder, files = root.parent if single else root, []
    for path in listing.paths:
        name = path.relative_to(folder).as_posix()
        try:
            status = path.stat()
        except OSError as error:
            listing.leave_out_broken(name, error.strerror or str(error))
        else:
            files.append(SourceFile(path, name, status.st_size, status.st_mtime_ns))
    broken = tuple(listing.broken if config.broken == "refuse" else ())
    source = Source(root, tuple(files), config.text_key, single, listing.left_out, broken)
    if not source.size:
        source.refuse_broken()
        names = [name for tally in listing.left_out.values() for name in tally.examples]
        all_left_out = f": all is left out, such as {', '.join(names)}" if names else ""
        raise DataError(
            f"there is no text in {root}{all_left_out}\n"
            "  do: set data.path to one with text, or to the folder of one prepared corpus"
        )
    return source


def first_lines(problems: Sequence[str]) -> str:
    """Return the first of some problems, one a line, and how many there are more."""
    shown = list(problems[:_SHOWN_PROBLEMS])
    more = len(problems) - len(shown)
    return "\n".join(f"  {line}" for line in (*shown, *([f"and {more:,} more"] if more else [])))


def _state(size: int, mtime_ns: int) -> str:
    return f"{size:,} bytes, written {datetime.fromtimestamp(mtime_ns / 1e9)}"


def _marks(file: SourceFile) -> str:
    """Return what the digest of a source contains of a file beside its name and content."""
    suffixes = (suffix for suffix in _FIRST_FORMATS if file.name.endswith(suffix))
    first = _FIRST_FORMATS.get(next(suffixes, ""), ("text", ""))
    detected = file.detected
    marked = "marked\0" if detected.is_marked else ""
    if (detected.format, detected.compression) == first or detected.is_binary:
        return marked
    return f"{detected.format}\0{detected.compression}\0{marked}"


def encode_name(name: str) -> bytes:
    """Return the bytes of a file's name, which need not be valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def _root(corpus: CorpusConfig) -> Path:
    """Return the path of the file or folder that a corpus is prepared from."""
    if {"stdlib": True, "text": False}[corpus.kind]:
        return Path(sysconfig.get_path("stdlib"))
    advice = "do: set data.path to a file of text, JSON lines, Parquet or CSV, or a folder of them"
    if corpus.path is None:
        raise NoSourceError(f"no text to read\n  {advice}")
    # links are not resolved: the name that the user typed tells the format
    root = Path(corpus.path).expanduser().absolute()
    try:
        mode = root.stat().st_mode
    except OSError as error:
        target = f", a link to {root.readlink()}" if root.is_symlink() else ""
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        problem = "" if is_absent and not target else f": {error.strerror or error}"
        what = f"there is no {root}" if is_absent else f"cannot read {root}"
        raise NoSourceError(f"{what}{target}{problem}\n  {advice}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise NoSourceError(f"{root} is a pipe, a socket or a device\n  {advice}")
    return root


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror or error}\n"
        "  do: make it readable, or set data.path to another file or folder"
    )
