"""Keep the states of a step available to the writer while training continues.

The states do not change between two updates, so nothing is copied when a checkpoint begins: the
writer reads chunks straight from the states, from the first chunk on. Before the next update the
fence copies the chunks that the writer has not reached into the pool, from the last chunk on.
States of a chunk:

- in the states: not read yet.
- being captured: the fence is copying it into the pool.
- in the pool: waits for the writer.
- read: in the writer's hands; neither the states nor the pool are needed.

    in the states -> read                                       (the writer was first)
    in the states -> being captured -> in the pool -> read      (the fence was first)

If the pool is full the fence waits for the writer: memory stays bounded and training is delayed.
For states on a GPU the pool is filled when the checkpoint begins, on a separate stream.
"""

import threading
from collections.abc import Iterator

import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.write_plan import WritePlan
from frontier_llm.errors import CheckpointError


class Snapshot:
    """The content of a plan's chunks as of one step.

    The trainer's thread calls `fence`; the writer's thread iterates over `chunks`.
    """

    def __init__(self, plan: WritePlan, pool: ChunkPool) -> None:
        """Begin a snapshot. The plan's states must not change until `fence` returns.

        Args:
            plan: layout of the file.
            pool: buffers for captured chunks, all free; at least one if the plan has chunks.
        """
        self._plan, self._pool = plan, pool
        self._bounce = pool.take()  # for chunks that the writer reads straight from the states
        self._changed = threading.Condition()
        self._taken = 0  # the writer has started to read chunks [0, taken)
        self._read = 0  # the writer no longer needs the states for chunks [0, read)
        self._fenced = len(plan.chunks)  # the fence has captured, or is capturing, [fenced, end)
        # captured chunks: by index, their buffer of the pool and the event of their copy
        self._held: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
        self._dead = False  # closed, or a capture failed
        self._stream: torch.cuda.Stream | None = None
        if plan.device.type != "cpu" and plan.chunks:
            self._begin_on_device()

    def chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the chunks of the file in order.

        Yields:
            (buffer, size of the chunk in bytes). The buffer is [chunk_bytes] uint8 on the host,
            valid until the next chunk is drawn.

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
                    self._give_back(buffer)

    def fence(self) -> None:
        """Return when the states may change: all chunks are read or captured in the pool."""
        done = False
        while not done:
            while self._capture_last():
                pass
            with self._changed:
                self._changed.wait_for(lambda: self._is_over() or self._can_capture())
                done = self._is_over()
        if self._stream is not None:  # the update waits for the copies, the host does not
            torch.cuda.current_stream(self._plan.device).wait_stream(self._stream)

    def close(self) -> None:
        """Return all buffers to the pool and wake the fence, even if chunks were left unread.

        The writer's thread calls this after the last chunk that it draws.
        """
        self._abandon()
        if self._bounce is not None:
            self._give_back(self._bounce)
            self._bounce = None

    def _is_over(self) -> bool:
        return self._dead or self._read >= self._fenced

    def _can_capture(self) -> bool:
        return self._fenced > self._taken and self._pool.has_free

    def _next(self, index: int) -> tuple[torch.Tensor, bool]:
        """Return a chunk's buffer, and whether it belongs to the pool."""
        event = None
        with self._changed:
            self._taken = index + 1
            from_states = index < self._fenced and index not in self._held
            if not from_states:
                self._changed.wait_for(lambda: index in self._held or self._dead)
                if index not in self._held:
                    raise CheckpointError("the states could not be copied for the checkpoint")
                buffer, event = self._held.pop(index)
        if from_states:
            assert self._bounce is not None
            buffer = self._bounce
            self._fill(index, buffer)
        if event is not None:
            event.synchronize()
        with self._changed:
            self._read = index + 1
            self._changed.notify_all()
        return buffer, not from_states

    def _capture_last(self) -> bool:
        """Capture the last chunk that is still in the states; return whether to try again."""
        with self._changed:
            index = self._fenced - 1
            if index < self._taken or self._dead:
                return False
            if index in self._held:  # captured when the snapshot began
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
            if self._dead:
                self._pool.give_back(buffer)
            else:
                self._held[index] = (buffer, None)
            self._changed.notify_all()
        return True

    def _fill(self, index: int, buffer: torch.Tensor) -> None:
        if self._stream is None:
            self._plan.fill(index, buffer)
            return
        with torch.cuda.stream(self._stream):
            self._plan.fill(index, buffer, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        event.synchronize()

    def _begin_on_device(self) -> None:
        """Start to copy as many chunks as the pool holds. Not covered by tests without a GPU."""
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
                self._held[index] = (buffer, event)

    def _give_back(self, buffer: torch.Tensor) -> None:
        with self._changed:
            self._pool.give_back(buffer)
            self._changed.notify_all()

    def _abandon(self) -> None:
        """Free all captured chunks and wake all waiting threads."""
        if self._stream is not None:
            self._stream.synchronize()  # no copy may still write into a buffer that is freed
        with self._changed:
            self._dead = True
            while self._held:
                self._pool.give_back(self._held.popitem()[1][0])
            self._changed.notify_all()
