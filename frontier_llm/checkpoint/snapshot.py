"""The states as they were when a checkpoint began, while training goes on.

Between two updates the states do not change, so nothing is copied in advance: the writer takes the
chunks of the file from the first on, straight from the states. Before the next update the fence
takes those the writer has not come to, from the last on, into the pool. Each chunk is in one of
these conditions:

    in the states  -> read by the writer                            (both before the fence ends)
    in the states  -> being copied by the fence -> in the pool -> read by the writer

When the pool is full the fence waits for the writer: memory stays bounded, the caller is held up.
For states on a GPU the pool is filled at the beginning, on a stream of its own.
"""

import threading
from collections.abc import Iterator

import torch

from frontier_llm.checkpoint.plan import Plan
from frontier_llm.checkpoint.pool import Pool
from frontier_llm.errors import CheckpointError


class Snapshot:
    """One state of a plan. The trainer's thread calls `fence`, the writer's draws `chunks`."""

    def __init__(self, plan: Plan, pool: Pool) -> None:
        """Begin.

        Args:
            plan: what to copy; its states do not change until `fence` returns.
            pool: where chunks wait, all free; one buffer at least for a plan that has chunks.
        """
        self._plan, self._pool = plan, pool
        self._bounce = pool.take()  # the writer's own, for what it reads straight from the states
        self._changed = threading.Condition()
        self._taken = 0  # chunks [0, taken) have been claimed by the writer
        self._read = 0  # chunks [0, read) need the states no more: they are in the writer's hands
        self._fenced = len(plan.chunks)  # chunks [fenced, end) belong to the fence
        self._held: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
        self._dead = False
        self._stream: torch.cuda.Stream | None = None
        if plan.device.type != "cpu" and plan.chunks:
            self._begin_on_device()

    def chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the chunks of the file in order.

        Yields:
            ([chunk_bytes] uint8 on the host, valid until the next one is drawn; bytes that count).

        Raises:
            CheckpointError: the fence failed.
        """
        for index in range(len(self._plan.chunks)):
            buffer, lent = self._next(index)
            try:
                yield buffer, self._plan.chunk_size(index)
            finally:
                if lent:
                    self._give_back(buffer)

    def fence(self) -> None:
        """Return when the states may change: what the writer has not read is in the pool."""
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
        """Give all buffers back, whether or not all chunks were drawn; nobody waits any longer.

        The writer's thread calls this when it has drawn its last chunk.
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
        """Return a chunk, and whether it is lent from the pool."""
        event = None
        with self._changed:
            self._taken = index + 1
            mine = index < self._fenced and index not in self._held
            if not mine:
                self._changed.wait_for(lambda: index in self._held or self._dead)
                if index not in self._held:
                    raise CheckpointError("the states could not be copied for the checkpoint")
                buffer, event = self._held.pop(index)
        if mine:
            assert self._bounce is not None
            buffer = self._bounce
            self._fill(index, buffer)
        if event is not None:
            event.synchronize()
        with self._changed:
            self._read = index + 1
            self._changed.notify_all()
        return buffer, not mine

    def _capture_last(self) -> bool:
        """Copy the last chunk that is still in the states; return whether there may be more."""
        with self._changed:
            index = self._fenced - 1
            if index < self._taken or self._dead:
                return False
            if index in self._held:  # copied at the beginning
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
        """Start copies of as many chunks as the pool takes. Not tested: no GPU was at hand."""
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
        """Give back what waits in the pool, and let nobody wait any longer."""
        if self._stream is not None:
            self._stream.synchronize()  # nothing is copied into a buffer that is given back
        with self._changed:
            self._dead = True
            while self._held:
                self._pool.give_back(self._held.popitem()[1][0])
            self._changed.notify_all()
