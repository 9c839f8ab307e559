"""Read parts of a checkpoint's files in threads, while the caller uses earlier parts.

Files of one checkpoint may lie in several places, for example on the disk of this node and on that
of another node. A thread per place reads, so that slow places are read at the same time. It has two
buffers. While it fills one of them, the caller verifies and uses the content of the other, so the
disk does not wait for the processor.
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
"""Buffers of each thread."""
_MOST_THREADS = 4
"""Most threads; more places than that share them."""


class ReadAhead:
    """Iterates over the content of file ranges, which are grouped by file.

    Entering the context starts the reader threads, and leaving ends them. If digests are verified,
    each range must be a whole chunk. To bypass the page cache is faster, unless other processes of
    this host read the same ranges.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ranges: Sequence[FileRange],
        verify: bool,
        bypass_cache: bool = True,
    ) -> None:
        self._count = len(ranges)
        self._checker = RangeReader(checkpoint, verify, bypass_cache)
        self._filled: SimpleQueue[tuple[_Lane, FileRange, torch.Tensor, Exception | None]]
        self._filled = SimpleQueue()
        by_place: dict[object, list[FileRange]] = {}
        for range_ in ranges:
            by_place.setdefault(checkpoint.place(range_.file), []).append(range_)
        by_thread: dict[int, list[FileRange]] = {}
        for number, found in enumerate(by_place.values()):
            by_thread.setdefault(number % _MOST_THREADS, []).extend(found)
        self._lanes = [
            _Lane(RangeReader(checkpoint, verify, bypass_cache), found)
            for found in by_thread.values()
        ]

    def __enter__(self) -> "ReadAhead":
        for lane in self._lanes:
            lane.thread = threading.Thread(
                target=self._read, args=(lane,), name="checkpoint reader", daemon=True
            )
            lane.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for lane in self._lanes:
            lane.free.put(None)
        for lane in self._lanes:
            if lane.thread is not None:
                lane.thread.join()

    def __iter__(self) -> Iterator[tuple[FileRange, torch.Tensor | CheckpointError]]:
        """Yield each range with its content, or with the error that reading it caused.

        Ranges in one place come in the order in which they were given. The content is
        [stop - start] uint8, valid until the next item is drawn.
        """
        for _ in range(self._count):
            lane, range_, buffer, error = self._filled.get()
            if error is not None and not isinstance(error, CheckpointError):
                raise error
            begin = range_.start - range_.first_page
            content = buffer[begin : begin + range_.stop - range_.start]
            yield range_, error or self._checker.damage(range_, content) or content
            lane.free.put(buffer)

    def _read(self, lane: "_Lane") -> None:
        """Fill buffers until all ranges are read or the context is left. Runs in a thread."""
        with lane.reader as reader:
            for range_ in lane.ranges:
                buffer = lane.free.get()
                if buffer is None:  # the context is left
                    return
                error: Exception | None = None
                try:
                    reader.fetch(range_, buffer)
                except Exception as failure:  # the caller waits for this range: pass it any error
                    error = failure
                self._filled.put((lane, range_, buffer, error))


class _Lane:
    def __init__(self, reader: RangeReader, ranges: Sequence[FileRange]) -> None:
        self.reader, self.ranges = reader, ranges
        self.thread: threading.Thread | None = None
        largest = max((range_.pages_bytes for range_ in ranges), default=0)
        pool = ChunkPool(min(_BUFFERS, len(ranges)), largest, torch.device("cpu"))
        self.free: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        while (buffer := pool.take()) is not None:
            self.free.put(buffer)
