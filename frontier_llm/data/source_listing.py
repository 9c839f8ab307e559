"""List the files of a folder, follow links once, and count what is not listed.

A folder or a file to which several paths lead is listed once. Files are told apart by their real
paths, because file systems of clusters may give equal inode numbers to different files.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from frontier_llm.data.corpus_account import BROKEN, HIDDEN, REPEATED, Tally
from frontier_llm.data.file_formats import claim_of

STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Names of folders that `data=stdlib` skips."""


@dataclass
class Listing:
    """Files of a folder.

    Attributes:
        paths: regular files to read, in order.
        left_out: files that are not read, by reason.
        broken: paths that cannot be read, with the reasons.
    """

    root: Path
    paths: list[Path] = field(default_factory=list)
    left_out: dict[str, Tally] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def leave_out(self, reason: str, name: str, size: int) -> None:
        """Count a file that is not read."""
        self.left_out.setdefault(reason, Tally()).add(name, size)

    def leave_out_broken(self, name: str, problem: str, size: int = 0) -> None:
        """Count a path that cannot be read."""
        self.leave_out(BROKEN, f"{name} ({problem})", size)
        self.broken.append(f"{self.root / name}: {problem}")


def list_folder(root: Path) -> Listing:
    """List all files in a folder and in the folders that it links to."""
    listing = _Lister(root)
    listing.run()
    return listing.listing


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
    """One walk through a folder. Links are followed after all folders without links."""

    def __init__(self, root: Path) -> None:
        self.listing = Listing(root)
        self._root = root
        self._folders: set[str] = set()  # real paths of the folders that were walked
        self._files: dict[str, list[tuple[Path, int]]] = {}  # paths and sizes by real path
        self._links: list[Path] = []  # links to folders

    def run(self) -> None:
        self._walk(self._root, hidden=False)
        while self._links:
            links, self._links = sorted(self._links), []
            for link in links:
                self._follow(link)
        self._choose()

    def _follow(self, link: Path) -> None:
        target = os.path.realpath(link)
        # a link to a folder that holds the link would add what is beside the source
        holder = os.path.realpath(link.parent)
        if target in self._folders or Path(holder).is_relative_to(target):
            self.listing.leave_out(REPEATED, f"{self._name(link)} (a link to {target})", 0)
        else:
            self._walk(link, hidden=False)

    def _walk(self, top: Path, *, hidden: bool) -> None:
        """Sort the entries of a folder and its subfolders, without following links."""
        waiting = [(top, hidden)]
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
            for entry in entries:
                path, hides = folder / entry.name, is_hidden or _hides(entry.name)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((path, hides))
                else:
                    target = path if entry.is_symlink() else Path(real, entry.name)
                    self._sort(path, target, hides)

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


def _hides(name: str) -> bool:
    """Return whether a file or folder is hidden: it begins with a dot, or holds Python's caches."""
    return name.startswith(".") or name == "__pycache__"
