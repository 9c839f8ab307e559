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

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool, check_host_memory
from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.write_plan import Entries, WritePlan, make_write_plan
from frontier_llm.checkpoint.writer import Options
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.coordination import meet
from frontier_llm.protocols import StateShard
from frontier_llm.units import format_bytes

_log = logging.getLogger(__name__)


class Snapshot:
    """The content of a rank's file as of one step.

    The capture thread calls `capture`, the trainer's thread calls `fence`, and the writer thread
    iterates over the chunks. The plan's states must not change until `fence` returns. The writer
    copies chunks from the states into its own buffer, [chunk_bytes] uint8, which it uses for one
    snapshot at a time; None: taken from the pool.
    """

    def __init__(
        self, plan: WritePlan, pool: ChunkPool, writer_buffer: torch.Tensor | None = None
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

        After an error, the iteration raises.
        """
        with suppress(Exception):  # the writer reports it
            self._set_device()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_claimed() or self._can_capture())
                    if self._is_claimed():
                        return
                self._capture(from_front=True)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
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
            event = self._stream.record_event()
        event.synchronize()

    def _set_device(self) -> None:
        """Choose the GPU of the states in this thread.

        Each thread has a current device, at first GPU 0: events and copies of this thread would
        make a context there.
        """
        if self._stream is not None:
            torch.cuda.set_device(self._plan.device)

    def _begin_on_device(self) -> None:
        self._stream = torch.cuda.Stream(self._plan.device)
        self._stream.wait_stream(torch.cuda.current_stream(self._plan.device))
        with torch.cuda.stream(self._stream):
            for index in range(len(self._plan.chunks)):
                buffer = self._pool.take()
                if buffer is None:
                    return
                self._plan.fill(index, buffer, non_blocking=True)
                event = self._stream.record_event()
                self._captured[index] = (buffer, event)
                self._front = index + 1

    def _abandon(self) -> None:
        try:
            if self._stream is not None:
                self._stream.synchronize()  # no copy may still write into a buffer that is freed
        finally:
            with self._changed:
                self._is_abandoned = True
                while self._captured:
                    self._pool.give_back(self._captured.popitem()[1][0])
                self._changed.notify_all()


class SnapshotMemory:
    """Makes the snapshots of one manager. They are valid as long as the states keep their memory.

    Managers of a rank have different prefixes of keys. If lazy, snapshots survive a change of the
    states. `prepare` makes `plan`, the layout of this rank's file.
    """

    plan: WritePlan

    def __init__(self, ranks: Ranks, prefix: str, options: Options, *, is_lazy: bool) -> None:
        self._ranks, self._prefix = ranks, prefix
        self._options, self._is_lazy = options, is_lazy
        self._planned = 0
        self._plan_key: list[object] | None = None
        self._pool: ChunkPool | None = None
        self._writer_buffer: torch.Tensor | None = None

    def fits(self, shards: Sequence[StateShard]) -> bool:
        """Whether the plan was made for these shards."""
        return _key_of(shards) == self._plan_key

    def prepare(self, shards: Sequence[StateShard]) -> None:
        """Plan the file and allocate host memory. No snapshot may be in use.

        Collective over the ranks that write one file together. A CheckpointError is raised if the
        host has not enough memory.
        """
        self._pool = self._writer_buffer = None  # free the old pool before the new one is allocated
        self._planned += 1
        self.plan = make_write_plan(
            shards,
            self._ranks.rank,
            self._options.chunk_bytes,
            self._options.file_ranks,
            self._exchange,
            # a node with its own folder also stores elements that another node stores
            everything=self._options.folder_ranks is not None,
            moments=self._options.moments,
        )
        self._pool = self._make_pool(self.plan)
        self._plan_key = _key_of(shards)
        if self.plan.chunks:
            self._writer_buffer = self._pool.take()
        _log.debug(
            "checkpoints take %s on disk and %s of host memory on rank %d",
            format_bytes(self.plan.size),
            format_bytes(self._pool.size),
            self._ranks.rank,
        )

    def snapshot(self) -> Snapshot:
        """Begin a snapshot of the states."""
        assert self._pool is not None
        return Snapshot(self.plan, self._pool, self._writer_buffer)

    def _exchange(self, entries: Entries) -> list[Entries]:
        assert self._options.file_ranks is not None
        prefix = f"{self._prefix}/layout/{self._planned}"
        self._ranks.store.set(f"{prefix}/{self._ranks.rank}", json.dumps(list(entries)))
        try:
            keys = [f"{prefix}/{rank}" for rank in self._options.file_ranks]
            self._ranks.store.wait(keys, self._ranks.timeout)
            return [json.loads(text) for text in self._ranks.store.multi_get(keys)]
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self._ranks.rank} timed out waiting for what the other ranks of its node "
                f"save: {str(error).splitlines()[0]}"
            ) from None

    def _make_pool(self, plan: WritePlan) -> ChunkPool:
        """Allocate one buffer for the writer thread and, in lazy mode, buffers for copies.

        With a shared pool, the first manager that is prepared allocates it.
        """
        options, chunks = self._options, len(plan.chunks)
        for_fence = chunks if self._is_lazy else 0
        if options.pool_bytes is not None:
            for_fence = min(for_fence, options.pool_bytes // options.chunk_bytes)
        buffers = for_fence + 1 if chunks else 0
        needed = buffers * options.chunk_bytes if options.pool is None else options.pool.size
        if options.pool is None or not options.pool.is_allocated:
            try:
                check_host_memory(needed, options.ranks_on_host)
            finally:
                if self._planned == 1:  # perhaps no other rank makes a later plan, so do not wait
                    self._wait_for_host_ranks()
        if options.pool is not None:
            return options.pool.buffers
        return ChunkPool(buffers, options.chunk_bytes, plan.device)

    def _wait_for_host_ranks(self) -> None:
        """Wait until all ranks of this host have checked the free memory.

        Without this wait, a rank could allocate its pool before another rank checks. The other rank
        would then find less free memory, and also count the first rank's pool as not allocated.
        """
        count = self._options.ranks_on_host
        first = self._ranks.rank // count * count
        ranks = min(first + count, self._ranks.size) - first
        if ranks == 1:
            return
        try:
            meet(self._ranks.store, f"{self._prefix}/memory/{first}", ranks, self._ranks.timeout)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self._ranks.rank} timed out waiting for the other ranks of its node to "
                f"check the host memory: {str(error).splitlines()[0]}"
            ) from None


def _key_of(shards: Sequence[StateShard]) -> list[object]:
    key: list[object] = []
    for shard in shards:
        key += [shard.record, shard.start, shard.elements]
        key += [(name, state.data_ptr()) for name, state in shard.states.items()]
    return key
