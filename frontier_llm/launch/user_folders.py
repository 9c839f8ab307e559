"""Folders of the user for files that later runs can use again, also if $HOME cannot be written."""

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

_LIBRARY_FOLDERS = {
    "WANDB_CACHE_DIR": (".cache/wandb", "XDG_CACHE_HOME"),
    "WANDB_CONFIG_DIR": (".config/wandb", "XDG_CONFIG_HOME"),
    "WANDB_DATA_DIR": (".local/share/wandb", "XDG_DATA_HOME"),
    "MPLCONFIGDIR": (".config/matplotlib", "XDG_CONFIG_HOME"),
    "TRITON_CACHE_DIR": (".triton/cache", ""),
    "HF_HOME": (".cache/huggingface", "XDG_CACHE_HOME"),
}
"""For each variable that names a folder of a library: the default, relative to $HOME, and the
variable that replaces all parts of the default except the last."""


def cache_folder() -> Path:
    """Return the user's cache folder of this program; make it if it does not exist.

    It is below $XDG_CACHE_HOME or ~/.cache. If that cannot be written, it is in the temporary
    directory of this machine, where only the user can read and write it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else _home() / ".cache") / "frontier_llm"
    if _make(folder):
        return folder
    folder = Path(tempfile.gettempdir(), f"frontier_llm-{os.getuid()}")
    if not make_private(folder):
        return folder
    return Path(tempfile.mkdtemp(prefix="frontier_llm-"))  # another user has made the folder


def make_private(folder: Path) -> str:
    """Make a folder for this user alone (mode 0700) if it does not exist.

    A folder of this user that others can read or write is closed to them. Returns why other users
    could read or exchange what is written to it; empty if they cannot.
    """
    parent = folder.parent
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = parent.stat()
        if not status.st_mode & stat.S_ISVTX:  # in a sticky folder, users own what they have made
            if status.st_uid not in (0, os.getuid()):
                return f"{parent} belongs to the user {status.st_uid}"
            if status.st_mode & stat.S_IWOTH:
                return f"every user may write to {parent}, which is not sticky"
        if not os.path.lexists(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is {'a link' if folder.is_symlink() else 'no folder'}"
        if status.st_uid != os.getuid():
            return f"{folder} belongs to the user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH:
            return f"every user may have written to {folder}"
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        return f"{error.filename} cannot be used: {error.strerror}"
    return ""


def find_stranger(folder: Path) -> str:
    """Make a run's folder on a node, for its user alone; return who else could change it."""
    try:
        problem = make_private(folder)
        if not problem and (links := _links(folder)):
            problem = f"{links[0]} is a link to {links[0].readlink()}"
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
    return problem


def _links(folder: Path) -> list[Path]:
    """Return the symbolic links in a folder and in the folders in it, and not those below."""
    entries = list(folder.iterdir())
    inner = [
        path
        for entry in entries
        if not entry.is_symlink() and entry.is_dir()
        for path in entry.iterdir()
    ]
    return [path for path in (*entries, *inner) if path.is_symlink()]


def redirect_libraries(environ: MutableMapping[str, str]) -> None:
    """Let libraries write to `cache_folder` if their default below $HOME cannot be written.

    wandb, matplotlib and others would print warnings or fail. Variables that are set are kept, and
    so is a cache of Hugging Face that can be read. Must be called before libraries are imported.
    """
    environ.setdefault("HOME", str(_home()))  # some libraries do not look into the user database
    for variable, (default, base) in _LIBRARY_FOLDERS.items():
        folder = _home() / default
        if environ.get(base):
            folder = Path(environ[base]) / folder.name
        is_readable = variable == "HF_HOME" and folder.is_dir()
        if variable not in environ and not is_readable and not _is_writable(folder):
            environ[variable] = str(cache_folder() / variable.lower())


def _home() -> Path:
    home = os.path.expanduser("~")  # noqa: PTH111 (Path.home() fails for a user without an entry)
    return Path(home if home != "~" else "/nonexistent")


def _is_writable(folder: Path) -> bool:
    """Return whether a folder, or the nearest one above it that exists, seems to be writable.

    Nothing is written, because thousands of ranks would do so at once in one file system.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    # virtual file systems such as /proc permit root to write, but have no space
    return existing.is_dir() and os.access(existing, os.W_OK) and os.statvfs(existing).f_bavail > 0


def _make(folder: Path) -> bool:
    """Make a folder for this user alone if it does not exist; return whether it can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
