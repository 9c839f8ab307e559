"""The interface of this package for a run: write the checkpoints of this rank to one folder.

manager.begin(step, shards, meta)   after an update: write a checkpoint (lazy mode: start to write)
manager.fence()                     before the next update: wait until the states may change
manager.wait()                      wait until all checkpoints are written; raise an error
manager.poll()                      raise a checkpoint's error if it is known; never waits
manager.close()                     at the end of the run: `fence`, then `wait`
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from frontier_llm.checkpoint.commit_barrier import CommitBarrier, Ranks
from frontier_llm.checkpoint.job_thread import JobThread
from frontier_llm.checkpoint.pacer import Cancellation
from frontier_llm.checkpoint.retention import prune
from frontier_llm.checkpoint.save import Task, save
from frontier_llm.checkpoint.snapshot import Snapshot, SnapshotMemory
from frontier_llm.checkpoint.write_plan import PAGE_BYTES, WritePlan
from frontier_llm.checkpoint.writer import DEFAULTS, CheckpointWriter, Options, Outcome
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import StateShard
from frontier_llm.units import format_seconds

Mode = Literal["blocking", "lazy"]
_log = logging.getLogger(__name__)
_LOGGED_STALL_SECONDS = 0.1
"""Shorter waits are counted but not logged."""


class CheckpointManager(CheckpointWriter):
    """Writes the states of one rank.

    After a failure the manager remains usable and the previous checkpoint is intact. The store must
    outlive `close` on every rank. In mode `blocking`, `begin` returns when the checkpoint is
    committed; in mode `lazy` it returns at once and a thread writes. `unfinished` has the steps
    that are begun and have not ended.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, mode: Mode, keep: int, options: Options = DEFAULTS
    ) -> None:
        assert keep >= 1, keep
        assert options.chunk_bytes % PAGE_BYTES == 0, options
        super().__init__("checkpoint", ranks)
        self._folder, self._is_lazy = folder, {"lazy": True, "blocking": False}[mode]
        self._keep, self._options = keep, options
        # the managers of a rank are numbered, so that two of them never use the same key
        self._manager_number = self._ranks.store.add(f"checkpoint/managers/{ranks.rank}", 1)
        self._begun = 0  # number of checkpoints so far
        prefix = f"checkpoint/{self._manager_number}"
        self._memory = SnapshotMemory(self._ranks, prefix, options, is_lazy=self._is_lazy)
        self._cancellation = Cancellation()
        self._snapshot: Snapshot | None = None
        self._capturer = JobThread("checkpoint capture")
        self._stall_seconds = 0.0
        self.unfinished: set[int] = set()

    def take_stall_seconds(self) -> float:
        """Return how many seconds the caller was blocked since the last call of this method."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is neither committed nor failed on this rank."""
        return self._writer.is_busy

    @property
    def plan(self) -> WritePlan:
        """Layout of this rank's file; `prepare` makes it."""
        return self._memory.plan

    def prepare(self, shards: Iterable[StateShard]) -> None:
        """Plan the file and allocate host memory, so that the first `begin` does not have to.

        Collective over the ranks that write one file together. A CheckpointError is raised if the
        host has not enough memory.
        """
        shards = list(shards)
        if not self._memory.fits(shards):
            self._writer.wait_below(1)
            self._capturer.wait_below(1)
            self._memory.prepare(shards)

    def begin(self, step: int, shards: Iterable[StateShard], meta: dict[str, Any]) -> None:
        """Write a checkpoint, or start to write it in lazy mode.

        Collective over all ranks, through the store. Waits first if `in_flight` checkpoints are
        unwritten. In lazy mode the states must not change until `fence` returns. Pass no shards if
        other ranks save all that this one holds. The manifest gets the `meta` of rank 0. Raises a
        CheckpointError if, in blocking mode, this checkpoint failed, or if, in lazy mode, an
        earlier one failed and `Options.in_flight` is 1.
        """
        # Keys in the store contain this number. So that it stays equal on all ranks, it is
        # increased before anything can fail on this rank.
        self._begun += 1
        self.unfinished.add(step)
        with self._stalling("until the one before is written"):
            self._writer.wait_below(self._options.in_flight)
        if self._options.in_flight == 1:
            self.poll()
        self.outcomes.pop(step, None)
        with self._stalling("until it is begun"):
            self.prepare(shards)
            task, barrier = self._task(step, meta)
            snapshot = self._memory.snapshot()
            if not self._is_lazy:
                self._save(task, snapshot, barrier)
        if self._is_lazy:
            self._snapshot = snapshot
            self._capturer.submit(snapshot.capture)
            self._writer.submit(lambda: self._save(task, snapshot, barrier))
        if not self._is_lazy:
            self.poll()

    def fence(self) -> None:
        """Copy the chunks that are not copied yet to host memory; then the states may change."""
        if self._snapshot is not None:
            with self._stalling("until its states are copied"):
                self._snapshot.fence()
                self._snapshot = None

    def wait(self) -> None:
        """Wait until no checkpoint is being written; raise the error of the last one."""
        with self._stalling("until it is written"):
            self._writer.wait_below(1)
        self.poll()

    def abandon(self) -> None:
        """Give up what is not committed, and wait until no thread reads the states."""
        self._cancellation.cancel()
        self._writer.wait_below(1)
        self._capturer.wait_below(1)
        self._snapshot = self._error = None

    def close(self) -> None:
        """Wait until the last checkpoint is committed; raise its error."""
        self.fence()
        self.wait()

    def _task(self, step: int, meta: dict[str, Any]) -> tuple[Task, CommitBarrier]:
        meta = json.loads(json.dumps(meta, allow_nan=False))  # a copy, safe from later changes
        prefix = f"checkpoint/{self._manager_number}/{self._begun}"
        barrier = self._make_barrier(prefix)
        folder_ranks = self._options.folder_ranks
        task = Task(
            self._folder,
            step,
            meta,
            self._ranks.rank,
            self.plan,
            folder_ranks or range(self._ranks.size),
            repeats=folder_ranks is not None,  # nodes may store the same elements
            moments=self._options.moments,
            cancellation=self._cancellation,
        )
        return task, barrier

    def _save(self, task: Task, snapshot: Snapshot, barrier: CommitBarrier) -> None:
        begin = time.monotonic()
        try:
            save(task, snapshot, barrier)
            self._end(task.step, "committed")
            options = self._options
            if task.is_first:  # this rank writes the manifest of the folder
                prune(
                    self._folder, task.step, self._keep, options.keep_every_steps, options.spared()
                )
            if self._ranks.rank == 0:
                seconds = format_seconds(time.monotonic() - begin)
                _log.info("%-10s step %d in %s: %s", "checkpoint", task.step, seconds, task.final)
                self._delete_keys_before(barrier)
        except BaseException as error:
            self._error = self._error or _as_checkpoint_error(task, error)
            self._end(task.step, "failed")

    def _end(self, step: int, outcome: Outcome) -> None:
        self._remember(step, outcome)
        self.unfinished.discard(step)
        self._options.on_end(step, outcome)

    @contextmanager
    def _stalling(self, reason: str) -> Iterator[None]:
        """Count the seconds inside the context as a stall of training, and log a long stall."""
        begin = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            self._stall_seconds += seconds
            if self._is_lazy and seconds > _LOGGED_STALL_SECONDS:
                waited = format_seconds(seconds)
                _log.info("training waited %s for a checkpoint: %s", waited, reason)


def _as_checkpoint_error(task: Task, error: BaseException) -> CheckpointError:
    text = f"the checkpoint of step {task.step} was not written: {error}"
    wrapped = CheckpointError(text)
    wrapped.__cause__ = error
    return wrapped
