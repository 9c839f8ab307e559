"""Keep the states of one step available to the writer thread while training continues.

The file of a rank is divided into chunks. The optimizer states do not change between two updates,
so nothing is copied when a checkpoint begins. Three threads then copy chunks, each chunk once:

- The capture thread copies chunks into the pool, a set of buffers in host memory. It begins with
  the first chunk, and runs while the next step computes.
- The writer thread takes chunks in the order of the file. If nobody has copied the next chunk, for
  example because the pool is full, it copies that chunk into a buffer of its own.
- The trainer's thread calls `fence` before the next update. It copies what is left into the pool,
  beginning with the last chunk.

    chunks of the file:  [ read or captured | in the states | captured by the fence ]
                         0                front            back                   end

If the pool is full, the fence waits for the writer. Memory stays bounded, but training is delayed.
Several snapshots may share a pool.
For states on a GPU, the first copies are queued when the checkpoint begins, on a separate CUDA
stream.
"""

from collections.abc import Iterator
from contextlib import suppress

import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.write_plan import WritePlan
from frontier_llm.errors import CheckpointError


class Snapshot:
    """The content of a rank's file as of one step.

    The capture thread calls `capture`, the trainer's thread calls `fence`, and the writer thread
    iterates over `chunks`. The plan's states must not change until `fence` returns. The writer
    copies chunks from the states into its own buffer, [chunk_bytes] uint8, which it uses for one
    snapshot at a time; None: taken from the pool.
    """

    def __init__(
        self,
        plan: WritePlan,
        pool: ChunkPool,
        writer_buffer: torch.Tensor | None = None,
    ) -> None:
        self._plan, self._pool = plan, pool
        self._returns_writer_buffer = writer_buffer is None
        self._writer_buffer = pool.take() if writer_buffer is None else writer_buffer
        self._changed = pool.changed
        self._front = 0  # chunks [0, front) are copied, or are being copied
        self._back = len(plan.chunks)  # chunks [back, end) are, too, by the fence
        self._copying = 0  # number of chunks that are being copied from the states
        # captured chunks by index: their buffer of the pool, and the CUDA event of their copy
        self._captured: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
        self._is_abandoned = False  # the writer has closed the snapshot, or a copy has failed
        self._error: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        if plan.device.type != "cpu" and plan.chunks:
            self._begin_on_device()

    def capture(self) -> None:
        """Copy chunks into the pool until none is left in the states; wait while it is full.

        After an error, `chunks` raises.
        """
        with suppress(Exception):  # the writer reports it
            self._set_device()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_claimed() or self._can_capture())
                    if self._is_claimed():
                        return
                self._capture(from_front=True)

    def chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the chunks in order; raise a CheckpointError if one could not be copied."""
        self._set_device()
        for index in range(len(self._plan.chunks)):
            buffer, from_pool = self._next(index)
            try:
                yield buffer, self._plan.chunk_size(index)
            finally:
                if from_pool:
                    self._pool.give_back(buffer)

    def fence(self) -> None:
        """Wait until the states may change, because all chunks are copied."""
        done = False
        while not done:
            while self._capture(from_front=False):
                pass
            with self._changed:
                self._changed.wait_for(lambda: self._states_are_free() or self._can_capture())
                done = self._states_are_free()
        if self._stream is not None:  # the update waits on the GPU, the host does not
            torch.cuda.current_stream(self._plan.device).wait_stream(self._stream)

    def close(self) -> None:
        """Return all buffers to the pool and wake the fence, even if some chunks are unread.

        The writer thread calls this after the last chunk that it needs.
        """
        self._abandon()
        if self._writer_buffer is not None and self._returns_writer_buffer:
            self._pool.give_back(self._writer_buffer)
        self._writer_buffer = None

    def _states_are_free(self) -> bool:
        return self._copying == 0 and self._is_claimed()

    def _can_capture(self) -> bool:
        return not self._is_claimed() and self._pool.has_free

    def _is_claimed(self) -> bool:
        """Whether each chunk is copied or being copied, or is not needed any more."""
        return self._is_abandoned or self._front >= self._back

    def _next(self, index: int) -> tuple[torch.Tensor, bool]:
        """Return a buffer with the chunk, and whether the caller must return it to the pool.

        Runs in the writer thread.
        """
        buffer, event = self._writer_buffer, None
        with self._changed:
            from_states = index == self._front < self._back
            if from_states:
                self._front, self._copying = index + 1, self._copying + 1
            else:
                self._changed.wait_for(lambda: index in self._captured or self._is_abandoned)
                if index not in self._captured:
                    cause = "" if self._error is None else f": {self._error}"
                    text = f"the states could not be copied for the checkpoint{cause}"
                    raise CheckpointError(text) from self._error
                buffer, event = self._captured.pop(index)
        assert buffer is not None
        if from_states:
            self._copy(index, buffer)
        if event is not None:
            event.synchronize()
        return buffer, not from_states

    def _capture(self, *, from_front: bool) -> bool:
        """Capture the first or last chunk that is in the states; return whether there was one.

        False also if the pool is full.
        """
        with self._changed:
            if not self._can_capture():
                return False
            index = self._front if from_front else self._back - 1
            buffer = self._pool.take()
            assert buffer is not None
            if from_front:
                self._front += 1
            else:
                self._back -= 1
            self._copying += 1
        is_copied = False
        try:
            self._copy(index, buffer)
            is_copied = True
        finally:
            with self._changed:
                if is_copied and not self._is_abandoned:
                    self._captured[index] = (buffer, None)
                else:
                    self._pool.give_back(buffer)
                self._changed.notify_all()
        return True

    def _copy(self, index: int, buffer: torch.Tensor) -> None:
        """Copy a chunk that `copying` counts into a buffer, and wait until it is copied."""
        try:
            self._fill(index, buffer)
        except BaseException as error:
            self._error = error
            self._abandon()
            raise
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()

    def _fill(self, index: int, buffer: torch.Tensor) -> None:
        if self._stream is None:
            self._plan.fill(index, buffer)
            return
        with torch.cuda.stream(self._stream):
            self._plan.fill(index, buffer, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        event.synchronize()

    def _set_device(self) -> None:
        """Choose the GPU of the states in this thread.

        Each thread has a current device, at first GPU 0: events and copies of this thread would
        make a context there.
        """
        if self._stream is not None:
            torch.cuda.set_device(self._plan.device)

    def _begin_on_device(self) -> None:
        """Start to capture as many chunks as the pool holds."""
        self._stream = torch.cuda.Stream(self._plan.device)
        self._stream.wait_stream(torch.cuda.current_stream(self._plan.device))
        with torch.cuda.stream(self._stream):
            for index in range(len(self._plan.chunks)):
                buffer = self._pool.take()
                if buffer is None:
                    return
                self._plan.fill(index, buffer, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
                self._captured[index] = (buffer, event)
                self._front = index + 1

    def _abandon(self) -> None:
        """Free all captured chunks and wake all waiting threads."""
        try:
            if self._stream is not None:
                self._stream.synchronize()  # no copy may still write into a buffer that is freed
        finally:
            with self._changed:
                self._is_abandoned = True
                while self._captured:
                    self._pool.give_back(self._captured.popitem()[1][0])
                self._changed.notify_all()
