"""Folders of the user for files that later runs can use again, also if $HOME cannot be written."""

import os
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
    if _make(folder) and not folder.is_symlink():
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return folder
    return Path(tempfile.mkdtemp(prefix="frontier_llm-"))  # another user has made the folder


def redirect_libraries(environ: MutableMapping[str, str]) -> None:
    """Let libraries write to `cache_folder` if their default below $HOME cannot be written.

    wandb, matplotlib and others would print warnings or fail. Variables that are set are kept, and
    so is a cache of Hugging Face that can be read. Must be called before libraries are imported.

    Args:
        environ: environment variables of this process, which are changed.
    """
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
    return os.access(existing, os.W_OK) and os.statvfs(existing).f_bavail > 0


def _make(folder: Path) -> bool:
    """Make a folder for this user alone if it does not exist; return whether it can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
