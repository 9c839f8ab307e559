"""Write files that are whole whenever somebody reads them."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def new_file(path: Path, suffix: str = ".partial") -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is on disk; else the one before stays, and no part.

    Processes that may write the same file at once need different suffixes of the unfinished one.
    """
    partial = path.with_name(f"{path.name}{suffix}")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str, suffix: str = ".partial") -> None:
    """Write a file in UTF-8, as `new_file`."""
    with new_file(path, suffix) as stream:
        stream.write(text.encode())


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
