"""Read ranges of a checkpoint's files into buffers, and compare them with their digests."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
import xxhash

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.peer_files import Peer, PeerConnection
from frontier_llm.checkpoint.write_plan import PAGE_BYTES
from frontier_llm.errors import CheckpointError, damaged_checkpoint

_BUFFERS = 2
_MOST_THREADS = 4
"""Most threads; more places than that share them."""
_DIRECT = getattr(os, "O_DIRECT", 0)


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


class RangeReader:
    """Reads ranges, and keeps the file that was read last open until the context is left.

    If digests are verified, each range must be a whole chunk. The page cache is bypassed, if
    wanted, where the file system supports this.
    """

    def __init__(self, checkpoint: Checkpoint, verify: bool, bypass_cache: bool = True) -> None:
        self._checkpoint, self._verify = checkpoint, verify
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (_DIRECT if bypass_cache else 0)
        self._name, self._descriptor = "", -1
        self._connections: dict[Peer, PeerConnection] = {}

    def __enter__(self) -> "RangeReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._close_file()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def fetch(self, range_: FileRange, buffer: torch.Tensor) -> None:
        """Read all pages that a range touches into a page-aligned buffer on the host.

        A CheckpointError is raised if the file cannot be read, or is too short.
        """
        place = self._checkpoint.place(range_.file)
        if isinstance(place, Peer):
            self._fetch_from(place, range_, buffer)
            return
        if range_.file != self._name:
            self._close_file()
            path = place / range_.file
            self._descriptor = self._open(path)
            self._name = range_.file
        self._fill(self._descriptor, place / range_.file, range_, buffer)

    def read(self, range_: FileRange, buffer: torch.Tensor) -> torch.Tensor:
        """Read a range as `fetch` does, compare its digest, and return its part of the buffer."""
        self.fetch(range_, buffer)
        begin = range_.start - range_.first_page
        content = buffer[begin : begin + range_.stop - range_.start]
        if damage := self.damage(range_, content):
            raise damage
        return content

    def _fetch_from(self, peer: Peer, range_: FileRange, buffer: torch.Tensor) -> None:
        if peer not in self._connections:
            self._connections[peer] = PeerConnection(peer)
        wanted = range_.stop - range_.first_page
        content = buffer.numpy().data[:wanted]
        count = self._connections[peer].read(range_.file, range_.first_page, content)
        if count < wanted:
            end = range_.first_page + count
            what = f"{range_.file} on {peer.host} is damaged: it ends at byte {end}"
            raise damaged_checkpoint(what)

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._name, self._descriptor = "", -1

    def _open(self, path: Path) -> int:
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

    def _fill(self, descriptor: int, path: Path, range_: FileRange, buffer: torch.Tensor) -> None:
        needed = range_.stop - range_.first_page
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
                raise damaged_checkpoint(f"{path} is damaged: it ends at byte {end}")
            done += count

    def damage(self, range_: FileRange, content: torch.Tensor) -> CheckpointError | None:
        """Return an error if a range is to be verified and does not match its digest."""
        if not self._verify:
            return None
        manifest, place = self._checkpoint.manifest, self._checkpoint.place(range_.file)
        wanted = manifest.files[range_.file].chunks[range_.start // manifest.chunk_bytes]
        if xxhash.xxh3_128_hexdigest(content.numpy().data) == wanted:
            return None
        where = f" on {place.host}" if isinstance(place, Peer) else ""
        path = range_.file if isinstance(place, Peer) else place / range_.file
        return damaged_checkpoint(
            f"{path}{where} is damaged: bytes {range_.start} to {range_.stop} do not match their "
            "digest"
        )


class Unreadable(CheckpointError):
    """The system does not read a file, which need not be damaged."""


def _unreadable(path: Path, error: OSError) -> Unreadable:
    return Unreadable(f"{path} cannot be read: {error.strerror or error}")


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

    def __exit__(self, *_: object) -> None:
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
