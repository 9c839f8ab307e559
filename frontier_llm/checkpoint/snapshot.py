"""Keep the states of one step available to the writer thread while training continues.

The file of a rank is divided into chunks. The optimizer states do not change between two updates,
so nothing is copied when a checkpoint begins. The writer thread reads chunks directly from the
states, beginning with the first chunk. Before the next update, the trainer's thread calls `fence`.
The fence captures the chunks that the writer has not reached: it copies them into the pool, a set
of buffers in host memory, beginning with the last chunk. A chunk is in one of these situations:

- in the states: not read yet.
- being captured: the fence is copying it into the pool.
- captured: in the pool, where it waits for the writer.
- read: the writer has the content, so neither the states nor the pool are needed for it.

    in the states -> read                                       (the writer was first)
    in the states -> being captured -> captured -> read         (the fence was first)

If the pool is full, the fence waits for the writer. Memory stays bounded, but training is delayed.
Several snapshots may share a pool.
For states on a GPU, the chunks are captured when the checkpoint begins, on a separate CUDA stream.
"""

from collections.abc import Iterator

import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.write_plan import WritePlan
from frontier_llm.errors import CheckpointError


class Snapshot:
    """The content of a rank's file as of one step.

    The trainer's thread calls `fence`, while the writer thread iterates over `chunks`.
    """

    def __init__(
        self,
        plan: WritePlan,
        pool: ChunkPool,
        writer_buffer: torch.Tensor | None = None,
    ) -> None:
        """Begin a snapshot. The plan's states must not change until `fence` returns.

        Args:
            plan: chunks of the file, and the states that fill them.
            pool: buffers for captured chunks.
            writer_buffer: [chunk_bytes] uint8, for the chunks that the writer reads from the
                states; the writer uses it for one snapshot at a time. None: taken from the pool.
        """
        self._plan, self._pool = plan, pool
        self._returns_writer_buffer = writer_buffer is None
        self._writer_buffer = pool.take() if writer_buffer is None else writer_buffer
        self._changed = pool.changed
        self._started = 0  # the writer has started to read chunks [0, started)
        self._read = 0  # the writer no longer needs the states for chunks [0, read)
        self._fenced = len(plan.chunks)  # the fence has captured, or is capturing, [fenced, end)
        # captured chunks by index: their buffer of the pool, and the CUDA event of their copy
        self._captured: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
        self._is_abandoned = False  # the writer has closed the snapshot, or a capture has failed
        self._stream: torch.cuda.Stream | None = None
        if plan.device.type != "cpu" and plan.chunks:
            self._begin_on_device()

    def chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the chunks of the file in order.

        Yields:
            (buffer, size of the chunk in bytes). The buffer is [chunk_bytes] uint8 on the host,
            valid until the caller asks for the next chunk.

        Raises:
            CheckpointError: the fence failed to capture a chunk.
        """
        if self._stream is not None:
            # each thread has a current device, at first GPU 0: events and copies of this thread
            # would make a context there
            torch.cuda.set_device(self._plan.device)
        for index in range(len(self._plan.chunks)):
            buffer, from_pool = self._next(index)
            try:
                yield buffer, self._plan.chunk_size(index)
            finally:
                if from_pool:
                    self._pool.give_back(buffer)

    def fence(self) -> None:
        """Wait until the states may change, because all chunks are read or captured."""
        done = False
        while not done:
            while self._capture_last():
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
        """Whether no chunk needs the states any more."""
        return self._is_abandoned or self._read >= self._fenced

    def _can_capture(self) -> bool:
        """Whether a chunk is still in the states and a buffer is free."""
        return self._fenced > self._started and self._pool.has_free

    def _next(self, index: int) -> tuple[torch.Tensor, bool]:
        """Return a buffer with the chunk, and whether the caller must return it to the pool.

        Runs in the writer thread.
        """
        event = None
        with self._changed:
            self._started = index + 1
            from_states = index < self._fenced and index not in self._captured
            if not from_states:
                self._changed.wait_for(lambda: index in self._captured or self._is_abandoned)
                if index not in self._captured:
                    raise CheckpointError("the states could not be copied for the checkpoint")
                buffer, event = self._captured.pop(index)
        if from_states:
            assert self._writer_buffer is not None
            buffer = self._writer_buffer
            self._fill(index, buffer)
        if event is not None:
            event.synchronize()
        with self._changed:
            self._read = index + 1
            self._changed.notify_all()
        return buffer, not from_states

    def _capture_last(self) -> bool:
        """Capture the last chunk that is still in the states; return whether to call this again."""
        with self._changed:
            index = self._fenced - 1
            if index < self._started or self._is_abandoned:
                return False
            if index in self._captured:  # captured when the snapshot began
                self._fenced = index
                return True
            buffer = self._pool.take()
            if buffer is None:
                return False
            self._fenced = index
        try:
            self._fill(index, buffer)
        except BaseException:
            self._abandon()
            raise
        with self._changed:
            if self._is_abandoned:
                self._pool.give_back(buffer)
            else:
                self._captured[index] = (buffer, None)
            self._changed.notify_all()
        return True

    def _fill(self, index: int, buffer: torch.Tensor) -> None:
        """Copy a chunk from the states into a buffer, and wait until it is copied."""
        if self._stream is None:
            self._plan.fill(index, buffer)
            return
        with torch.cuda.stream(self._stream):
            self._plan.fill(index, buffer, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        event.synchronize()

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

    def _abandon(self) -> None:
        """Free all captured chunks and wake all waiting threads."""
        if self._stream is not None:
            self._stream.synchronize()  # no copy may still write into a buffer that is freed
        with self._changed:
            self._is_abandoned = True
            while self._captured:
                self._pool.give_back(self._captured.popitem()[1][0])
            self._changed.notify_all()
