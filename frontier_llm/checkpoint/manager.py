"""The interface of this package for a run: write checkpoints of this rank, one at a time.

manager.begin(step, shards, meta)   after an update: write a checkpoint (lazy mode: start to write)
manager.fence()                     before the next update: wait until the states may change
manager.wait()                      wait until the last checkpoint is written; raise its error
manager.poll()                      raise the last checkpoint's error if it is known; never waits
manager.close()                     at the end of the run: `fence`, then `wait`
"""

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from frontier_llm.checkpoint.chunk_pool import ChunkPool, check_host_memory, wait_for_host_ranks
from frontier_llm.checkpoint.commit_barrier import CommitBarrier
from frontier_llm.checkpoint.manifest import CHUNK_BYTES
from frontier_llm.checkpoint.retention import prune
from frontier_llm.checkpoint.save import Task, save
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.checkpoint.write_plan import PAGE_BYTES, Entries, WritePlan, make_write_plan
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import StateShard
from frontier_llm.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)
_LOGGED_STALL_SECONDS = 0.1
"""Shorter waits are counted but not logged."""


@dataclass(frozen=True)
class Options:
    """Settings of retention, memory and file layout that most runs leave at their defaults."""

    keep_every_steps: int | None = None
    """Checkpoints whose step is a multiple of this number are kept forever."""
    pool_bytes: int | None = None
    """Limit in bytes of the host memory into which `fence` copies chunks; None: enough for all
    chunks. With less memory, `fence` waits if the disk is slow."""
    chunk_bytes: int = CHUNK_BYTES
    """Size of a chunk in bytes, a multiple of 4096 (a page). Each write is one chunk."""
    folder_ranks: range | None = None
    """Ranks of this node, if each node has its own folder; None if all ranks share one folder. Two
    nodes may store the same elements, since each stores all that its ranks pass to `begin`."""
    file_ranks: range | None = None
    """Ranks of this node, if they write one file together; None if each rank writes its own."""
    ranks_on_host: int = 1
    """Number of ranks on this host. Each of them allocates the same amount of host memory."""


class CheckpointManager:
    """Writes the checkpoints of one rank, at most one at a time.

    All ranks create their managers and begin their checkpoints in the same order. One thread calls
    all methods. After a failure the manager remains usable and the previous checkpoint is intact.

    Attributes:
        committed_step: step of the newest checkpoint, as soon as this rank knows that the
            checkpoint is committed; None before. The writer thread sets it.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        store: "Store",
        mode: Literal["blocking", "lazy"],
        keep: int,
        timeout: timedelta,
        options: Options = Options(),
    ) -> None:
        """Initialise the manager without writing or allocating anything.

        Args:
            folder: folder of all checkpoints of the run, on a file system that all ranks share
                unless `options.folder_ranks` is set.
            rank: rank of this process.
            world_size: number of ranks.
            store: key-value store of all ranks; it must outlive `close` on every rank.
            mode: with `blocking`, `begin` returns when the checkpoint is committed. With `lazy`,
                `begin` returns at once and a thread writes.
            keep: number of newest checkpoints to keep.
            timeout: how long this rank waits for the other ranks after it has finished writing.
            options: settings that most runs leave at their defaults.
        """
        assert keep >= 1, keep
        assert options.chunk_bytes % PAGE_BYTES == 0, options
        self._folder, self._rank, self._size = folder, rank, world_size
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it
        self._timeout, self._is_lazy = timeout, mode == "lazy"
        self._keep, self._options = keep, options
        # the managers of a rank are numbered, so that two of them never use the same key
        self._manager_number = self._store.add(f"checkpoint/managers/{rank}", 1)
        self._begun = self._planned = 0  # numbers of checkpoints and of write plans so far
        self._old_barriers: list[CommitBarrier] = []
        self._plan_key: list[object] | None = None
        self._plan: WritePlan | None = None
        self._pool: ChunkPool | None = None
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stall_seconds = 0.0
        self.committed_step: int | None = None

    def take_stall_seconds(self) -> float:
        """Return how many seconds the caller was blocked since the last call of this method."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    @property
    def failed(self) -> bool:
        """Whether `poll` would raise. All ranks exchange this value, so that they stop together."""
        return self._error is not None

    def prepare(self, shards: Iterable[StateShard]) -> None:
        """Plan the file and allocate host memory, so that the first `begin` does not have to.

        Collective over the ranks that write one file together.

        Args:
            shards: the shards that will be passed to `begin`.

        Raises:
            CheckpointError: the host has not enough memory.
        """
        shards = list(shards)
        # the plan stays valid as long as the states keep their shapes and memory addresses
        key: list[object] = []
        for shard in shards:
            key += [shard.record, shard.start, len(shard.master)]
            key += [(name, state.data_ptr()) for name, state in shard.states.items()]
        if key == self._plan_key:
            return
        self._pool = None  # free the old pool before the new one is allocated
        self._planned += 1
        self._plan = make_write_plan(
            shards,
            self._rank,
            self._options.chunk_bytes,
            self._options.file_ranks,
            self._exchange,
            # a node with its own folder also stores elements that another node stores
            everything=self._options.folder_ranks is not None,
        )
        self._pool = self._make_pool(self._plan)
        self._plan_key = key
        _log.info(
            "checkpoints take %s on disk and %s of host memory on rank %d",
            format_bytes(self._plan.size),
            format_bytes(self._pool.size),
            self._rank,
        )

    def begin(self, step: int, shards: Iterable[StateShard], meta: dict[str, Any]) -> None:
        """Write a checkpoint, or start to write it in lazy mode.

        Collective over all ranks, through the store. Waits for the previous checkpoint first. In
        lazy mode the states must not change until `fence` returns.

        Args:
            step: number of optimizer steps done.
            shards: shards that this rank saves; empty if other ranks save all that it holds.
            meta: plain JSON for the manifest, which stores the value that rank 0 passes.

        Raises:
            CheckpointError: the previous checkpoint failed, or in blocking mode this one.
        """
        # Keys in the store contain this number. So that it stays equal on all ranks, it is
        # increased before anything can fail on this rank.
        self._begun += 1
        self.wait()
        self.committed_step = None
        with self._stalling("begin"):
            self.prepare(shards)
            task, barrier = self._task(step, meta)
            assert self._pool is not None
            snapshot = Snapshot(task.plan, self._pool)
            if not self._is_lazy:
                self._save(task, snapshot, barrier)
        if self._is_lazy:
            self._snapshot = snapshot
            self._thread = threading.Thread(
                target=self._save, args=(task, snapshot, barrier), name="checkpoint", daemon=True
            )
            self._thread.start()
        self.poll()

    def fence(self) -> None:
        """Copy the chunks that are not written yet to host memory; then the states may change."""
        if self._snapshot is not None:
            with self._stalling("fence"):
                self._snapshot.fence()
                self._snapshot = None

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            CheckpointError: the last checkpoint was not committed.
        """
        with self._stalling("wait"):
            self._join()
        self.poll()

    def poll(self) -> None:
        """Raise the error of the last checkpoint, once, if it is already known. Never waits.

        Raises:
            CheckpointError: the last checkpoint was not committed. Every rank gets the same cause,
                possibly at different times.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until the last checkpoint is committed.

        Raises:
            CheckpointError: the last checkpoint was not committed.
        """
        self.fence()
        self.wait()

    def _task(self, step: int, meta: dict[str, Any]) -> tuple[Task, CommitBarrier]:
        assert self._plan is not None
        meta = json.loads(json.dumps(meta, allow_nan=False))  # a copy, safe from later changes
        prefix = f"checkpoint/{self._manager_number}/{self._begun}"
        barrier = CommitBarrier(self._store, prefix, self._rank, self._size, self._timeout)
        folder_ranks = self._options.folder_ranks
        task = Task(
            self._folder,
            step,
            meta,
            self._rank,
            self._plan,
            folder_ranks or range(self._size),
            repeats=folder_ranks is not None,  # nodes may store the same elements
        )
        return task, barrier

    def _exchange(self, entries: Entries) -> list[Entries]:
        """Exchange keys and sizes of entries between the ranks that write one file together.

        Returns:
            The entries of each of these ranks, in the order of ranks.

        Raises:
            CheckpointError: another rank timed out.
        """
        assert self._options.file_ranks is not None
        prefix = f"checkpoint/{self._manager_number}/layout/{self._planned}"
        self._store.set(f"{prefix}/{self._rank}", json.dumps(list(entries)))
        try:
            keys = [f"{prefix}/{rank}" for rank in self._options.file_ranks]
            self._store.wait(keys, self._timeout)
            return [json.loads(text) for text in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self._rank} timed out waiting for what the other ranks of its node save: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def _make_pool(self, plan: WritePlan) -> ChunkPool:
        """Allocate one buffer for the writer thread and, in lazy mode, buffers for `fence`.

        Raises:
            CheckpointError: the host has not enough memory, or another of its ranks timed out.
        """
        options, chunks = self._options, len(plan.chunks)
        for_fence = chunks if self._is_lazy else 0
        if options.pool_bytes is not None:
            for_fence = min(for_fence, options.pool_bytes // options.chunk_bytes)
        buffers = for_fence + 1 if chunks else 0
        try:
            check_host_memory(buffers * options.chunk_bytes, options.ranks_on_host)
        finally:
            if self._planned == 1:  # perhaps no other rank makes a later plan, so do not wait
                self._wait_for_host_ranks()
        return ChunkPool(buffers, options.chunk_bytes, plan.device)

    def _wait_for_host_ranks(self) -> None:
        count = self._options.ranks_on_host
        first = self._rank // count * count
        wait_for_host_ranks(
            self._store,
            f"checkpoint/{self._manager_number}/memory/{first}",
            self._rank,
            range(first, min(first + count, self._size)),
            self._timeout,
        )

    def _save(self, task: Task, snapshot: Snapshot, barrier: CommitBarrier) -> None:
        """Save on the current thread, and keep an error for `poll`."""
        begin = time.monotonic()
        try:
            save(task, snapshot, barrier)
            self.committed_step = task.step
            if task.is_first:  # this rank writes the manifest of the folder
                prune(self._folder, task.step, self._keep, self._options.keep_every_steps)
            if self._rank == 0:
                seconds = time.monotonic() - begin
                _log.info("%s: %s", task.final, format_seconds(seconds))  # final: its folder
                self._delete_keys(barrier)
        except BaseException as error:
            self._error = _as_checkpoint_error(task, error)
            self._old_barriers.append(barrier)

    def _delete_keys(self, barrier: CommitBarrier) -> None:
        """Delete the keys of earlier checkpoints from the store; no rank reads them any more."""
        with suppress(RuntimeError):  # the store is lost, and its keys with it
            for old in self._old_barriers:
                old.delete_keys()
        self._old_barriers = [barrier]

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextmanager
    def _stalling(self, method: str) -> Iterator[None]:
        """Count the seconds inside the context as a stall of training, and log a long stall."""
        begin = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            self._stall_seconds += seconds
            if self._is_lazy and seconds > _LOGGED_STALL_SECONDS:
                waited = format_seconds(seconds)
                _log.info("training waited %s for checkpoints (%s)", waited, method)


def _as_checkpoint_error(task: Task, error: BaseException) -> CheckpointError:
    text = f"the checkpoint of step {task.step} was not written: {error}"
    wrapped = CheckpointError(text)
    wrapped.__cause__ = error
    return wrapped
