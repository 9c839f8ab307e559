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
"""For each variable that names a folder of a library: the library's default, relative to $HOME, and
the variable that replaces the first part of the default (XDG base directory specification)."""
_ONLY_IF_ABSENT = ("HF_HOME",)
"""Folders that a library also uses if they exist and can only be read."""


def cache_folder() -> Path:
    """Return the user's cache folder of this program; make it if it does not exist.

    It is below $XDG_CACHE_HOME or ~/.cache. If that cannot be written, it is in the temporary
    directory of this machine, where only the user can read and write it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else _home() / ".cache") / "frontier_llm"
    return folder if _make(folder) else _temporary_folder()


def redirect_libraries(environ: MutableMapping[str, str]) -> None:
    """Let libraries write to `cache_folder` if their default below $HOME cannot be written.

    wandb, matplotlib and others would print warnings or fail. Variables that are set are kept. Must
    be called before the libraries are imported.

    Args:
        environ: environment variables of this process, which are changed.
    """
    for variable, (default, base) in _LIBRARY_FOLDERS.items():
        folder = _home() / default
        if environ.get(base):
            folder = Path(environ[base]) / folder.name
        is_readable = variable in _ONLY_IF_ABSENT and folder.is_dir()
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
    return os.access(existing, os.W_OK) and os.statvfs(existing).f_bavail > 0


def _make(folder: Path) -> bool:
    """Make a folder for this user alone if it does not exist; return whether it can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _temporary_folder() -> Path:
    """Return the user's folder in the temporary directory; a new one if a stranger has made it."""
    folder = Path(tempfile.gettempdir(), f"frontier_llm-{os.getuid()}")
    if _make(folder):
        status = folder.lstat()
        is_private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
        if is_private and status.st_uid == os.getuid():
            return folder
    return Path(tempfile.mkdtemp(prefix="frontier_llm-"))
