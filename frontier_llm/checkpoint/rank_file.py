"""Write the file of one rank, chunk by chunk, and compute the digest of each chunk.

A chunk (16 MiB by default) is written at once and bypasses the page cache where the file system
allows it. Space is reserved first, so a full disk is detected before anything is written. A file
that cannot be finished is removed, because it would keep its reserved blocks. A copy that was
interrupted by a crash may go on: chunks that the file already holds are not written again.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import xxhash

from frontier_llm.checkpoint.chunk_pool import host_buffer
from frontier_llm.checkpoint.manifest import FilePart
from frontier_llm.checkpoint.write_plan import PAGE_BYTES
from frontier_llm.errors import NO_ROOM, CheckpointError
from frontier_llm.units import format_bytes

_DIRECT = getattr(os, "O_DIRECT", 0)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems that cannot reserve space."""


class RankFile:
    """A new file, or one rank's part of a shared file, to which chunks are appended in order.

    It is a context manager that removes the file if an exception leaves the context. Methods and
    constructor raise a CheckpointError if the file cannot be written. An existing part is
    overwritten. A file of `total` bytes is shared, and this part begins at a multiple of 4096 (a
    page). If the file `continues`, it may hold chunks that an earlier attempt has written: each is
    compared, and the `kept_bytes` of equal ones are not written again.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        offset_bytes: int = 0,
        total: int | None = None,
        *,
        continues: bool = False,
    ) -> None:
        self._path, self._size, self._offset, self._written = path, size, offset_bytes, 0
        self._ends_file = total is None or offset_bytes + size == total
        self._chunks: list[str] = []
        self._earlier: torch.Tensor | None = None  # buffer for chunks of an earlier attempt
        self._continues, self.kept_bytes = continues and path.exists(), 0
        # a digest takes a tenth of the time of a write: another thread computes it meanwhile
        self._hasher = ThreadPoolExecutor(1, "checkpoint digest")
        is_new = total is None and not self._continues
        try:
            truncate = os.O_TRUNC if is_new else 0
            self._fd = _create(path, truncate | (os.O_RDWR if self._continues else os.O_WRONLY))
        except OSError as error:
            raise self._failure(error) from None
        try:
            os.posix_fallocate(self._fd, offset_bytes, size)
        except OSError as error:
            # Where the file system cannot reserve space, the C library writes single bytes instead.
            # O_DIRECT rejects such writes; the file is then written without reserved space.
            if error.errno not in _UNSUPPORTED:
                self._remove()
                raise self._failure(error) from None

    def __enter__(self) -> "RankFile":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._hasher.shutdown()
        if error is not None:
            self._remove()

    def write(self, buffer: torch.Tensor, size: int) -> None:
        """Append a chunk of `size` bytes; the rest of the page-aligned buffer is padding."""
        content = buffer.numpy().data
        digest = self._start_digest(content[:size])
        whole_pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        try:
            if self._continues and self._holds(buffer, size):
                self._written += whole_pages
                self.kept_bytes += size
            else:
                self._write(content[:whole_pages])
        except OSError as error:
            raise self._failure(error) from None
        finally:
            self._chunks.append(digest())

    def finish(self) -> FilePart:
        """Cut off the padding after the last chunk, sync the file, and close it."""
        try:
            if self._ends_file:
                os.ftruncate(self._fd, self._offset + self._size)
            os.fsync(self._fd)
            os.close(self._fd)
        except OSError as error:
            raise self._failure(error) from None
        self._fd = -1
        return FilePart(offset_bytes=self._offset, size=self._size, chunks=tuple(self._chunks))

    def _start_digest(self, content: memoryview) -> Callable[[], str]:
        try:
            return self._hasher.submit(xxhash.xxh3_128_hexdigest, content).result
        except RuntimeError:  # the interpreter is ending: threads cannot be started any more
            return partial(xxhash.xxh3_128_hexdigest, content)

    def _holds(self, buffer: torch.Tensor, size: int) -> bool:
        if self._earlier is None:
            self._earlier = host_buffer(buffer.numel())
        content, done = self._earlier.numpy().data, 0
        while done < size:
            try:
                count = os.preadv(self._fd, [content[done:]], self._offset + self._written + done)
            except OSError:
                return False
            if not count:
                return False
            done += count
        return torch.equal(self._earlier[:size], buffer[:size])

    def _write(self, content: memoryview) -> None:
        while content:
            try:
                count = os.pwrite(self._fd, content, self._offset + self._written)
            except OSError as error:
                # some file systems accept O_DIRECT in `open` and reject the write
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
        if error.errno not in NO_ROOM:
            return CheckpointError(f"{self._path} cannot be written: {error.strerror or error}")
        return CheckpointError(
            f"{self._path} cannot be written: {error.strerror} (it takes "
            f"{format_bytes(self._size)}, {_free(self._path.parent)} are free now); free space "
            "there, or if there are several checkpoints, start again with a lower checkpoint.keep, "
            "which deletes the older ones"
        )


def _create(path: Path, mode: int) -> int:
    flags = mode | os.O_CREAT | os.O_CLOEXEC
    for direct in (_DIRECT, _DIRECT, _DIRECT, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, flags | direct, 0o644)
        except FileNotFoundError:  # another rank failed and removed the empty folder
            continue
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
    raise FileNotFoundError(errno.ENOENT, "other ranks keep removing its folder", str(path))


def _free(folder: Path) -> str:
    try:
        return format_bytes(shutil.disk_usage(folder).free)
    except OSError:
        return "an unknown number of bytes"
