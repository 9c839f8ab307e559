"""The face of this package for a run: checkpoints of this rank, one after the other.

manager.begin(step, shards, meta)   after an update; returns at once when lazy
manager.wait()                      raises what went wrong with the last one, once it is done
manager.poll()                      any time: the same, of what is known by then
manager.fence()                     before the next update
manager.close()                     at the end: the last one is committed
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

import psutil

from frontier_llm.checkpoint.commit import Ballot
from frontier_llm.checkpoint.manifest import CHUNK_BYTES, STATES
from frontier_llm.checkpoint.plan import PAGE_BYTES, Entries, Plan, make_plan
from frontier_llm.checkpoint.pool import Pool
from frontier_llm.checkpoint.retention import prune
from frontier_llm.checkpoint.save import Task, save
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import StateShard
from frontier_llm.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)
_WORTH_A_WORD_SECONDS = 0.1


@dataclass(frozen=True)
class Options:
    """What most runs leave alone."""

    keep_every_steps: int | None = None
    """Checkpoints whose step is a multiple of this stay for good."""
    pool_bytes: int | None = None
    """Most host memory for what `fence` must copy; None: enough for all. Less makes the fence wait
    where the disk is slow."""
    chunk_bytes: int = CHUNK_BYTES
    """Written at once; a multiple of a page."""
    sharing: range | None = None
    """The ranks that share the folder, where it is a node's own; None: all do. A node's checkpoint
    holds all that its ranks pass to `begin`, also what another node has too."""
    together: range | None = None
    """The ranks that write one file together, this one's node; None: each writes its own."""
    neighbours: int = 1
    """Ranks on this host, which allocate as much memory as this one."""


class CheckpointManager:
    """Writes the checkpoints of one rank; at most one is under way.

    All ranks make their managers, and begin their checkpoints, in the same order. The methods are
    for one thread. After a failure the manager can be used on: the checkpoint before is untouched.
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
        """Prepare; nothing is written or allocated.

        Args:
            folder: of all checkpoints of the run, on a file system that all ranks share.
            rank: of this process.
            world_size: number of ranks.
            store: where the ranks met; it must outlive `close` on every rank.
            mode: `blocking`: `begin` returns when the checkpoint is committed. `lazy`: at once;
                a thread writes.
            keep: how many of the newest checkpoints stay.
            timeout: how much later than this rank any other may finish writing.
            options: of memory and retention.
        """
        assert keep >= 1, keep
        assert options.chunk_bytes % PAGE_BYTES == 0, options
        self._folder, self._rank, self._size = folder, rank, world_size
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it
        self._timeout, self._is_lazy = timeout, mode == "lazy"
        self._keep, self._options = keep, options
        # managers of one rank are numbered, so that no key is used twice
        self._number = self._store.add(f"checkpoint/managers/{rank}", 1)
        self._attempt = self._layouts = 0
        self._old: list[Ballot] = []
        self._key: list[object] | None = None
        self._plan: Plan | None = None
        self._pool: Pool | None = None
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stall_seconds = 0.0

    def take_stall_seconds(self) -> float:
        """Return the seconds the caller was blocked since it last asked."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    @property
    def failed(self) -> bool:
        """Whether `poll` would raise: for agreement among ranks before one of them leaves."""
        return self._error is not None

    def prepare(self, shards: Iterable[StateShard]) -> None:
        """Plan the file and allocate host memory now rather than in the first `begin`.

        Where ranks write one file together, they all call this.

        Args:
            shards: as for `begin`.

        Raises:
            CheckpointError: there is no memory for it.
        """
        shards = list(shards)
        # the same states at the same places: the plan holds, whatever their values
        key: list[object] = []
        for shard in shards:
            key += [shard.record, shard.start, len(shard.master)]
            key += [getattr(shard, state).data_ptr() for state in STATES]
        if key == self._key:
            return
        self._pool = None  # its memory goes before the new one's comes
        self._layouts += 1
        self._plan = make_plan(
            shards,
            self._rank,
            self._options.chunk_bytes,
            self._options.together,
            self._exchange,
            everything=self._options.sharing is not None,
        )
        self._pool = self._make_pool(self._plan)
        self._key = key
        _log.info(
            "checkpoints take %s on disk and %s of host memory on rank %d",
            format_bytes(self._plan.size),
            format_bytes(self._pool.size),
            self._rank,
        )

    def begin(self, step: int, shards: Iterable[StateShard], meta: dict[str, Any]) -> None:
        """Write a checkpoint.

        Collective over all ranks, through the store alone. Waits for the one before. When lazy,
        the states must not change until `fence` returns.

        Args:
            step: optimizer steps done.
            shards: this rank's states; none where another replica saves them.
            meta: plain JSON that `restore` returns; rank 0's counts.

        Raises:
            CheckpointError: the checkpoint before failed, or (blocking) this one.
        """
        self._attempt += 1  # before anything can fail here alone: ranks number their attempts alike
        self.wait()
        with self._stalling("begin"):
            self.prepare(shards)
            task, ballot = self._task(step, meta)
            assert self._pool is not None
            snapshot = Snapshot(task.plan, self._pool)
            if not self._is_lazy:
                self._save(task, snapshot, ballot)
        if self._is_lazy:
            self._snapshot = snapshot
            self._thread = threading.Thread(
                target=self._save, args=(task, snapshot, ballot), name="checkpoint", daemon=True
            )
            self._thread.start()
        self.poll()

    def fence(self) -> None:
        """Return when the states may change; copies what the writer has not read by then."""
        if self._snapshot is not None:
            with self._stalling("fence"):
                self._snapshot.fence()
                self._snapshot = None

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: the last checkpoint was not committed.
        """
        with self._stalling("wait"):
            self._join()
        self.poll()

    def poll(self) -> None:
        """Raise what went wrong with the last checkpoint, once. Takes no time.

        Raises:
            CheckpointError: it was not committed; the same cause on every rank, sooner or later.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until the last checkpoint is committed.

        Raises:
            CheckpointError: it was not.
        """
        self.fence()
        self.wait()

    def _task(self, step: int, meta: dict[str, Any]) -> tuple[Task, Ballot]:
        assert self._plan is not None
        plain = json.loads(json.dumps(meta, allow_nan=False))  # a copy: the caller goes on
        prefix = f"checkpoint/{self._number}/{self._attempt}"
        ballot = Ballot(self._store, prefix, self._rank, self._size, self._timeout)
        sharing = self._options.sharing
        task = Task(
            self._folder,
            step,
            plain,
            self._rank,
            self._plan,
            sharing or range(self._size),
            repeats=sharing is not None,
        )
        return task, ballot

    def _exchange(self, entries: Entries) -> list[Entries]:
        """Tell the ranks that write the same file what this one will write, and hear of them.

        Raises:
            CheckpointError: one of them does not say.
        """
        assert self._options.together is not None
        prefix = f"checkpoint/{self._number}/layout/{self._layouts}"
        self._store.set(f"{prefix}/{self._rank}", json.dumps(list(entries)))
        try:
            keys = [f"{prefix}/{rank}" for rank in self._options.together]
            self._store.wait(keys, self._timeout)
            return [json.loads(text) for text in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self._rank} waited in vain for what the other ranks of its node save: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def _make_pool(self, plan: Plan) -> Pool:
        """Make room for the writer's chunk and, when lazy, for those that wait."""
        options, chunks = self._options, len(plan.chunks)
        waiting = chunks if self._is_lazy else 0
        if options.pool_bytes is not None:
            waiting = min(waiting, options.pool_bytes // options.chunk_bytes)
        try:
            self._check_memory((waiting + 1) * options.chunk_bytes if chunks else 0)
        finally:
            self._meet_neighbours()
        return Pool(waiting + 1 if chunks else 0, options.chunk_bytes, plan.device)

    def _check_memory(self, needed: int) -> None:
        """Refuse what this host cannot hold beside its other ranks' pools.

        Raises:
            CheckpointError: says how much there is.
        """
        ranks, free = self._options.neighbours, psutil.virtual_memory().available
        if needed * ranks > free:
            raise CheckpointError(
                f"checkpoints need {format_bytes(needed)} of host memory on each of the {ranks} "
                f"ranks of a node, {format_bytes(needed * ranks)} in all; {format_bytes(free)} "
                "is free. Set checkpoint.pool_bytes to less (the update then waits for the disk), "
                "or cut the optimizer states over more ranks"
            )

    def _meet_neighbours(self) -> None:
        """Wait until all ranks of this host have looked: a pool that is there would count twice.

        Raises:
            CheckpointError: one of them does not come.
        """
        width = self._options.neighbours
        if width == 1 or self._layouts > 1:
            return
        first = self._rank // width * width
        key = f"checkpoint/{self._number}/memory/{first}"
        if self._store.add(key, 1) == min(width, self._size - first):
            self._store.set(f"{key}/all", "")
        try:
            self._store.wait([f"{key}/all"], self._timeout)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self._rank} waited in vain for its node's other ranks to look at the "
                f"memory: {str(error).splitlines()[0]}"
            ) from None

    def _save(self, task: Task, snapshot: Snapshot, ballot: Ballot) -> None:
        """Save, on whatever thread; what goes wrong is kept for `poll`."""
        begin = time.monotonic()
        try:
            save(task, snapshot, ballot)
            if task.leads:
                prune(self._folder, task.step, self._keep, self._options.keep_every_steps)
            if self._rank == 0:
                seconds = time.monotonic() - begin
                _log.info("%s: %s", task.final, format_seconds(seconds))
                self._forget(ballot)
        except BaseException as error:
            self._error = _as_checkpoint_error(task, error)
            self._old.append(ballot)

    def _forget(self, ballot: Ballot) -> None:
        """Delete the keys of ballots that every rank has left."""
        with suppress(RuntimeError):  # the store is gone, and its keys with it
            for old in self._old:
                old.forget()
        self._old = [ballot]

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextmanager
    def _stalling(self, where: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            self._stall_seconds += seconds
            if self._is_lazy and seconds > _WORTH_A_WORD_SECONDS:
                _log.info("training waited %s for checkpoints (%s)", format_seconds(seconds), where)


def _as_checkpoint_error(task: Task, error: BaseException) -> CheckpointError:
    text = f"the checkpoint of step {task.step} was not written: {error}"
    made = CheckpointError(text)
    made.__cause__ = error
    return made
