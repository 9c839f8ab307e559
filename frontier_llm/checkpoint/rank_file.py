"""One rank's file while it is written: large aligned writes, digested on the way.

Space is reserved first, so that a full disk shows before anything is written; a file that cannot
be finished is removed, for it would keep its blocks.
"""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

import torch
import xxhash

from frontier_llm.checkpoint.manifest import File
from frontier_llm.checkpoint.plan import PAGE_BYTES
from frontier_llm.errors import CheckpointError
from frontier_llm.units import format_bytes

_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class RankFile:
    """A new file that takes its chunks in order; a context manager that removes it on failure."""

    def __init__(self, path: Path, size: int) -> None:
        """Create the file and reserve its space.

        Args:
            path: overwritten; its folder is made.
            size: bytes.

        Raises:
            CheckpointError: it cannot be made, or there is no room for it.
        """
        self._path, self._size, self._written = path, size, 0
        self._digest = xxhash.xxh3_128()
        self._chunks: list[str] = []
        try:
            self._fd = _create(path)
        except OSError as error:
            raise self._failure(error) from None
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            # The C library reserves where the file system cannot, by single bytes: O_DIRECT
            # refuses these, and we do without.
            if error.errno not in _UNSUPPORTED:
                self._remove()
                raise self._failure(error) from None

    def __enter__(self) -> "RankFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._remove()

    def write(self, buffer: torch.Tensor, size: int) -> None:
        """Append a chunk.

        Args:
            buffer: [size or more, whole pages] uint8 on the host, page-aligned; read only.
            size: bytes of it that count.

        Raises:
            CheckpointError: it cannot be written.
        """
        content = buffer.numpy().data
        self._chunks.append(xxhash.xxh3_128_hexdigest(content[:size]))
        self._digest.update(content[:size])
        whole_pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        try:
            self._write(content[:whole_pages])
        except OSError as error:
            raise self._failure(error) from None

    def finish(self) -> File:
        """Cut what the last page has too much, and wait until all is on disk.

        Raises:
            CheckpointError: it is not.
        """
        try:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
            os.close(self._fd)
        except OSError as error:
            raise self._failure(error) from None
        self._fd = -1
        return File(size=self._size, xxh3_128=self._digest.hexdigest(), chunks=tuple(self._chunks))

    def _write(self, content: memoryview) -> None:
        while content:
            try:
                count = os.pwrite(self._fd, content, self._written)
            except OSError as error:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)
                continue
            self._written += count
            content = content[count:]

    def _remove(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def _failure(self, error: OSError) -> CheckpointError:
        if error.errno not in _NO_ROOM:
            return CheckpointError(f"{self._path} cannot be written: {error.strerror or error}")
        return CheckpointError(
            f"{self._path} cannot be written: {error.strerror} (it takes "
            f"{format_bytes(self._size)}, {_free(self._path.parent)} are free now); free space "
            "there, or keep fewer checkpoints"
        )


def _create(path: Path) -> int:
    """Open a new file, without the page cache where the file system can do without."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    for direct in (_DIRECT, _DIRECT, _DIRECT, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, flags | direct, 0o644)
        except FileNotFoundError:  # another rank gave up and removed the folder, empty as it was
            continue
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
    raise FileNotFoundError(errno.ENOENT, "its folder disappears again and again", str(path))


def _free(folder: Path) -> str:
    try:
        return format_bytes(shutil.disk_usage(folder).free)
    except OSError:
        return "unknown bytes"
