"""Read parts of a checkpoint's files in a thread, while the caller uses earlier parts.

There are two buffers. While the thread fills one of them, the caller verifies and uses the content
of the other, so the disk does not wait for the processor.
"""

import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType

import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.range_reader import FileRange, RangeReader
from frontier_llm.errors import CheckpointError

_BUFFERS = 2


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
        self._ranges = ranges
        self._reader = RangeReader(checkpoint, verify, bypass_cache)
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
            yield range_, error or self._reader.damage(range_, content) or content
            self._free.put(buffer)

    def _read(self) -> None:
        """Fill buffers until all ranges are read or the context is left. Runs in the thread."""
        with self._reader as reader:
            for range_ in self._ranges:
                buffer = self._free.get()
                if buffer is None:  # the context is left
                    return
                error: Exception | None = None
                try:
                    reader.fetch(range_, buffer)
                except Exception as failure:  # the caller waits for this range: pass it any error
                    error = failure
                self._filled.put((buffer, error))
