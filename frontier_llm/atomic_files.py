"""Write files that are whole whenever somebody reads them."""

import errno
import os
from contextlib import suppress
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file in UTF-8; if that fails with an OSError, the file before stays, and no part."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def publish_folder(draft: Path, folder: Path) -> None:
    """Rename a finished folder so that a crash at any time leaves no incomplete one."""
    for path in (*draft.iterdir(), draft):
        sync(path)
    try:
        draft.rename(folder)
    except OSError as error:
        # without locks another process may have finished the same folder first
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk, for example after a rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
