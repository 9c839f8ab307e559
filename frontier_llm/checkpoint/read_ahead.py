"""Read parts of a checkpoint's files in a thread, while the caller uses earlier parts.

There are two buffers. While the thread fills one of them, the caller verifies and uses the content
of the other, so the disk does not wait for the processor.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch
import xxhash

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.write_plan import PAGE_BYTES
from frontier_llm.errors import CheckpointError

_DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag that bypasses the page cache; 0 on systems without it."""
_BUFFERS = 2


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file, inside one chunk: the part of a file that has one digest.

    A range that is to be verified is the whole chunk.
    """

    file: str
    start: int
    stop: int

    @property
    def first_page(self) -> int:
        """Page-aligned start offset in bytes."""
        return self.start // PAGE_BYTES * PAGE_BYTES

    @property
    def pages_bytes(self) -> int:
        """Size in bytes of all pages that the range touches."""
        return -(-(self.stop - self.first_page) // PAGE_BYTES) * PAGE_BYTES


def chunk_ranges(checkpoint: Checkpoint, name: str) -> list[FileRange]:
    """Return all chunks of the file `name`."""
    size, chunk_bytes = checkpoint.manifest.files[name].size, checkpoint.manifest.chunk_bytes
    return [
        FileRange(name, start, min(start + chunk_bytes, size))
        for start in range(0, size, chunk_bytes)
    ]


class ReadAhead:
    """Iterates over the content of file ranges.

    It is a context manager: entering starts the reader thread, and leaving ends it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ranges: Sequence[FileRange],
        verify: bool,
        bypass_cache: bool = True,
    ) -> None:
        """Allocate the buffers. Nothing is read before the context is entered.

        Args:
            checkpoint: checkpoint whose files are read.
            ranges: ranges to read, grouped by file.
            verify: whether to compare digests. If so, each range must be a whole chunk.
            bypass_cache: whether to bypass the page cache where the file system supports this. It
                is faster, unless other processes of this host read the same ranges.
        """
        self._checkpoint, self._ranges, self._verify = checkpoint, ranges, verify
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (_DIRECT if bypass_cache else 0)
        largest = max((range_.pages_bytes for range_ in ranges), default=0)
        pool = ChunkPool(min(_BUFFERS, len(ranges)), largest, torch.device("cpu"))
        self._free: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        while (buffer := pool.take()) is not None:
            self._free.put(buffer)
        self._filled: SimpleQueue[tuple[torch.Tensor, Exception | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="checkpoint reader", daemon=True)

    def __enter__(self) -> "ReadAhead":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._free.put(None)
        self._thread.join()

    def __iter__(self) -> Iterator[tuple[FileRange, torch.Tensor | CheckpointError]]:
        """Yield each range with its content, or with the error that reading it caused.

        Yields:
            (range, content). The content is [stop - start] uint8, valid until the next item is
            drawn.
        """
        for range_ in self._ranges:
            buffer, error = self._filled.get()
            if error is not None and not isinstance(error, CheckpointError):
                raise error
            begin = range_.start - range_.first_page
            content = buffer[begin : begin + range_.stop - range_.start]
            yield range_, error or self._damage(range_, content) or content
            self._free.put(buffer)

    def _read(self) -> None:
        """Fill buffers until all ranges are read or the context is left. Runs in the thread."""
        with ExitStack() as opened:
            name, descriptor = "", -1
            for range_ in self._ranges:
                buffer = self._free.get()
                if buffer is None:  # the context is left
                    return
                error: Exception | None = None
                try:
                    if range_.file != name:
                        opened.close()  # the previous file
                        descriptor, name = self._open(range_.file), range_.file
                        opened.callback(os.close, descriptor)
                    self._fetch(descriptor, range_, buffer)
                except Exception as failure:  # the caller waits for this range: pass it any error
                    error = failure
                self._filled.put((buffer, error))

    def _open(self, name: str) -> int:
        path = self._checkpoint.folder / name
        try:
            try:
                descriptor = os.open(path, self._flags)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                descriptor = os.open(path, self._flags & ~_DIRECT)
        except OSError as error:
            raise _unreadable(path, error) from None
        if not self._flags & _DIRECT:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return descriptor

    def _fetch(self, descriptor: int, range_: FileRange, buffer: torch.Tensor) -> None:
        """Read all pages that a range touches into a buffer."""
        path, needed = self._checkpoint.folder / range_.file, range_.stop - range_.first_page
        content = buffer.numpy().data[: range_.pages_bytes]
        done = 0
        while done < needed:
            try:
                count = os.preadv(descriptor, [content[done:]], range_.first_page + done)
            except OSError as error:
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise _unreadable(path, error) from None
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
                continue
            if not count:
                end = range_.first_page + done
                raise CheckpointError(f"{path} is damaged: it ends at byte {end}")
            done += count

    def _damage(self, range_: FileRange, content: torch.Tensor) -> CheckpointError | None:
        """Return an error if a range is to be verified and does not match its digest."""
        if not self._verify:
            return None
        manifest, path = self._checkpoint.manifest, self._checkpoint.folder / range_.file
        wanted = manifest.files[range_.file].chunks[range_.start // manifest.chunk_bytes]
        if xxhash.xxh3_128_hexdigest(content.numpy().data) == wanted:
            return None
        return CheckpointError(
            f"{path} is damaged: bytes {range_.start} to {range_.stop} do not match their digest; "
            "move this checkpoint away to use an earlier one"
        )


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}")
