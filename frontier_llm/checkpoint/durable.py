"""Changes of folders that are on disk when the call returns."""

import os
import shutil
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Delete a folder and what is in it."""
    shutil.rmtree(folder)
    sync_folder(folder.parent)
