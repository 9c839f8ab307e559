"""The plan of a rank's file, and the host memory for snapshots of the states that fill it."""

import json
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool, check_host_memory, wait_for_host_ranks
from frontier_llm.checkpoint.manager_options import Options
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.checkpoint.write_plan import Entries, WritePlan, make_write_plan
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import StateShard
from frontier_llm.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)


class SnapshotMemory:
    """Makes the snapshots of one manager. They are valid as long as the states keep their memory.

    Managers of a rank have different prefixes of keys. If lazy, snapshots survive a change of the
    states.

    Attributes:
        plan: layout of this rank's file; `prepare` makes it.
    """

    plan: WritePlan

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: "Store",
        prefix: str,
        timeout: timedelta,
        options: Options,
        *,
        is_lazy: bool,
    ) -> None:
        self._rank, self._size, self._store, self._prefix = rank, world_size, store, prefix
        self._timeout, self._options, self._is_lazy = timeout, options, is_lazy
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
            self._rank,
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
            self._rank,
        )

    def snapshot(self) -> Snapshot:
        """Begin a snapshot of the states."""
        assert self._pool is not None
        return Snapshot(self.plan, self._pool, self._writer_buffer)

    def _exchange(self, entries: Entries) -> list[Entries]:
        """Return the keys and sizes of the entries of each rank that writes the same file."""
        assert self._options.file_ranks is not None
        prefix = f"{self._prefix}/layout/{self._planned}"
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
        count = self._options.ranks_on_host
        first = self._rank // count * count
        wait_for_host_ranks(
            self._store,
            f"{self._prefix}/memory/{first}",
            self._rank,
            range(first, min(first + count, self._size)),
            self._timeout,
        )


def _key_of(shards: Sequence[StateShard]) -> list[object]:
    """Return what must stay equal for a plan to stay valid: shapes and memory addresses."""
    key: list[object] = []
    for shard in shards:
        key += [shard.record, shard.start, shard.elements]
        key += [(name, state.data_ptr()) for name, state in shard.states.items()]
    return key
