"""Reading ranges of a checkpoint's files, each verified before its bytes are used."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from frontier_llm.checkpoint.manifest import File
from frontier_llm.checkpoint.scan import Checkpoint
from frontier_llm.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]


class FileReader:
    """One file of a checkpoint, read through a window; a context manager.

    What is verified is read in whole chunks. The rest of the last one stays in the window, so a
    chunk that two ranges share is read once if the ranges come in order.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, verify: bool) -> None:
        """Open the file.

        Raises:
            CheckpointError: it cannot be opened.
        """
        self._path: Path = checkpoint.folder / name
        self._file: File = checkpoint.manifest.files[name]
        self._unit = checkpoint.manifest.chunk_bytes if verify else 1
        self._verify = verify
        self._start, self._length = 0, 0  # the window, in the file
        self._buffer = np.empty(0, dtype=np.uint8)  # begins with it
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from None

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def read(self, start: int, stop: int) -> Bytes:
        """Return bytes [start, stop) of the file; valid until the next call.

        Raises:
            CheckpointError: they cannot be read, or are not what was written; names the file and
                the range.
        """
        if start < self._start or stop > self._start + self._length:
            self._move(start, stop)
        return self._buffer[start - self._start : stop - self._start]

    def chunks(self) -> Iterator[tuple[int, CheckpointError | None]]:
        """Verify the whole file.

        Yields:
            (bytes looked at, what is wrong with them), chunk by chunk.
        """
        for start in range(0, self._file.size, self._unit):
            stop = min(start + self._unit, self._file.size)
            try:
                self.read(start, stop)
            except CheckpointError as error:
                yield stop - start, error
            else:
                yield stop - start, None

    def _move(self, start: int, stop: int) -> None:
        """Move the window forward over [start, stop), or anywhere else; keep what is in it."""
        end = self._start + self._length
        if self._start <= start < end:
            kept, done = self._buffer[start - self._start : self._length].copy(), end
        else:
            kept, done = self._buffer[:0], start // self._unit * self._unit
        begin = done - kept.size
        last = min(-(-stop // self._unit) * self._unit, self._file.size)
        if last - begin > self._buffer.size:
            self._buffer = np.empty(last - begin, dtype=np.uint8)
        self._buffer[: kept.size] = kept
        self._start, self._length = begin, kept.size
        while done < last:
            next_ = min(done + self._unit, last) if self._verify else last
            self._fetch(self._buffer[done - begin : next_ - begin], done)
            done = next_
        self._length = last - begin

    def _fetch(self, target: Bytes, start: int) -> None:
        got = 0
        while got < target.size:
            try:
                count = os.preadv(self._fd, [target[got:].data], start + got)
            except OSError as error:
                raise self._unreadable(error) from None
            if not count:
                raise CheckpointError(f"{self._path} is damaged: it ends at byte {start + got}")
            got += count
        if self._verify:
            index = start // self._unit
            if xxhash.xxh3_128_hexdigest(target.data) != self._file.chunks[index]:
                raise CheckpointError(
                    f"{self._path} is damaged: bytes {start} to {start + target.size} are not "
                    "what was written; move this checkpoint away to use an earlier one"
                )

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be read: {error.strerror or error}")
