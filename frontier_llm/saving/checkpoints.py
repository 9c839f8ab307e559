"""The checkpoints of a run: when they are written, to which tier, and what a failure does.

There are two tiers: the run directory, which all nodes share, and optionally a local disk of each
node (`checkpoint.tiers.local`). At a step at which both are due, the checkpoint is written to the
nodes' disks and copied from there to the run directory. frontier_llm/checkpoint writes the files.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store

from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.save import NodeCommitError
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.coordination import meet
from frontier_llm.launch.world import World
from frontier_llm.saving.tier_writers import TierWriters
from frontier_llm.saving.tiers import local_root, shared_folder
from frontier_llm.units import format_seconds

_LOG = logging.getLogger(__name__)
_PREFIX = "checkpoint/end"
_SLOWEST_SECONDS = 60.0
"""How much later than this rank the slowest rank may come to the end."""


class BoundedEnd:
    """Waits for the last checkpoint, but not forever.

    A file system that hangs blocks the threads that write to it, perhaps forever. If the nodes have
    disks of their own for checkpoints, the main thread does not wait longer than
    `checkpoint.end_seconds`. All ranks then save the states, which have not changed since the last
    step, to the disks of the nodes, and the run ends with a message. All ranks call its methods
    together.
    """

    def __init__(
        self, config: RunConfig, world: World, store: Store, tiers: TierWriters, limit: float
    ) -> None:
        self._config, self._world, self._tiers, self._limit = config, world, tiers, limit
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it

    def wait(self, step: int, meta: Mapping[str, Any], *, is_safe: bool) -> bool:
        """Wait until everything is written and copied, or the time is over.

        `is_safe`: the run directory has had the step since the start of the run. Returns whether
        every rank has written and copied everything, or knows why it has failed. If not, the run
        directory has at least the last step. Raises a CheckpointError if it does not have this step
        because it hangs, or could not take it and `checkpoint.on_error` is `stop`.
        """
        limit, deadline = self._limit, time.monotonic() + self._limit
        waits = [writer.wait_for for writer in self._tiers.writers]
        is_done = all([wait(max(0.0, deadline - time.monotonic())) for wait in waits])
        is_safe = is_safe or step in self._tiers.run_dir.committed()
        late, unsafe = self._sum(int(not is_done), int(not is_safe))
        if unsafe:
            self._save_on_nodes(step, meta)
            message = self._message(step, is_late=bool(late))
            if late or self._config.checkpoint.on_error == "stop":
                raise CheckpointError(message)
            if self._world.rank == 0:
                _LOG.error("%s", message)
        elif late and self._world.rank == 0:
            _LOG.warning(
                "checkpoints before step %d are not copied to %s within %s "
                "(checkpoint.end_seconds); step %d is there",
                step, shared_folder(self._config), format_seconds(limit), step,
            )  # fmt: skip
        return not late

    def _sum(self, late: int, unsafe: int) -> tuple[int, int]:
        """Return the sums of two numbers over all ranks; raise a CheckpointError if one is lost."""
        try:
            self._store.add(f"{_PREFIX}/late", late)
            self._store.add(f"{_PREFIX}/unsafe", unsafe)
            timeout = timedelta(seconds=self._limit + _SLOWEST_SECONDS)
            meet(self._store, f"{_PREFIX}/arrived", self._world.size, timeout)
            return self._store.add(f"{_PREFIX}/late", 0), self._store.add(f"{_PREFIX}/unsafe", 0)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"the ranks cannot end the run together: {reason}") from None

    def _save_on_nodes(self, step: int, meta: Mapping[str, Any]) -> None:
        node, copies = self._tiers.node, self._tiers.next_node.mover
        exact = node.managers[0]
        if step in exact.outcomes:
            return
        if self._world.rank == 0:
            _LOG.warning("step %d is written to the disks of the nodes instead", step)
        if copies is not None:
            copies.enqueue(step, dict(meta))
        exact.begin(step, node.shards(), dict(meta))
        exact.wait()  # no update follows, so there is nothing to fence
        if copies is not None:
            copies.wait_for(self._limit)

    def _message(self, step: int, *, is_late: bool) -> str:
        config, run_dir, limit = self._config, self._tiers.run_dir, format_seconds(self._limit)
        cause = f"did not take step {step} within {limit} (checkpoint.end_seconds)"
        if not is_late:
            cause = f"could not take step {step}"
            try:
                run_dir.managers[0].poll()
            except CheckpointError as error:
                cause += f" ({error})"
        kept = run_dir.committed()
        newest = f"the newest step that this job has written there is {max(kept)}" if kept else ""
        newest = newest or "this job has written no step there"
        return (
            f"the run directory {cause}: {shared_folder(config)}; {newest}\n"
            f"  step {step} is on the disks of the nodes, in {local_root(config)}\n"
            f"  do: when the file system works again, start on the same nodes with "
            f"run.dir={config.run.dir}; the run continues from step {step} and copies it to the "
            "run directory. If the disks are erased when the job ends, copy this folder of each "
            "node before, and copy it back before the start"
        )


@dataclass(frozen=True)
class SavingState:
    """What one rank knows of its checkpoints, or what is known after all ranks were asked.

    A checkpoint that rank 0 no longer writes has been written by all ranks, or has failed. So of
    `to_run_dir` and `to_node`, what rank 0 is writing from its states or host memory to the run
    directory and to the disk of its node, only the values of rank 0 are used.
    """

    failed: bool = False
    """Whether the last checkpoint failed on this rank, or on any."""
    committed: bool = False
    """Whether this rank, or every rank, knows of a committed checkpoint about which callbacks were
    not told yet."""
    to_run_dir: bool = False
    to_node: bool = False


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint in the run directory that is complete on disk."""

    step: int
    folder: Path
    """Folder of the checkpoint. It may be deleted later, when newer checkpoints replace it, or be
    renamed, when the run goes back to an earlier step."""


class Checkpoints:
    """Saves this rank's states after the steps at which a checkpoint is due.

    Every rank calls the same methods at the same steps. Writer threads learn of a commit at
    different times, but all ranks announce it at the same point of the run: after the step whose
    all-reduce shows that every rank knows of the commit, or after all ranks have waited for it.
    The store outlives this object, and an archive may, too.

    Attributes:
        tiers: what writes and copies checkpoints.
        saved_step: step of the newest checkpoint in the run directory that was begun.
        meta: returns what is saved in addition to the states, as plain JSON.
        on_begin: called before a checkpoint in the run directory is begun, with its step.
        on_committed: called when all ranks know that such a checkpoint is committed.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        store: Store,
        tiers: TierWriters,
        meta: Callable[[], dict[str, Any]],
    ) -> None:
        self._run_config, self._config = config, config.checkpoint
        self._stops = {"stop": True, "continue": False}[config.checkpoint.on_error]
        self._skips = {"wait": False, "skip": True}[config.checkpoint.when_busy]
        self._world, self._store, self.tiers, self.meta = world, store, tiers, meta
        self.saved_step: int | None = None
        self._begun_step: int | None = None
        self.on_begin: Callable[[int], None] = lambda _: None
        self.on_committed: Callable[[CommittedCheckpoint], None] = lambda _: None
        self._avoids_nodes = self._drain_is_due = self._has_logged_skip = False
        self._skipped = 0

    def state(self) -> SavingState:
        """Return what this rank tells all others in a step. A drain does not count as saving."""
        tiers = self.tiers
        oldest = tiers.unannounced[0] if tiers.unannounced else None
        return SavingState(
            failed=any(writer.failed for writer in tiers.writers),
            committed=oldest is not None and tiers.run_dir.outcome(oldest) is not None,
            to_run_dir=tiers.run_dir.is_writing,
            to_node=tiers.node.is_writing,
        )

    def announce_commit(self) -> None:
        """Announce the oldest commit that was not, unless it was given up. All ranks call this."""
        self._announce(self.tiers.unannounced[0])

    def take_stall_seconds(self) -> float:
        """Return how many seconds training waited for checkpoints since the last call."""
        return sum(manager.take_stall_seconds() for manager in self.tiers.managers)

    def take_skipped(self) -> int:
        """Return how many checkpoints were skipped since the last call (`checkpoint.when_busy`)."""
        count, self._skipped = self._skipped, 0
        return count

    def steps_since_copy(self, step: int) -> int | None:
        """Return how many steps are lost with a node now; None before the first copy."""
        mover = self.tiers.next_node.mover
        return None if mover is None or mover.newest is None else step - mover.newest

    def before_update(self) -> None:
        """Wait until the states may change, because a checkpoint no longer needs them."""
        for manager in self.tiers.managers:
            manager.fence()

    def secure(self, step: int, meta: dict[str, Any]) -> None:
        """Copy the node-local checkpoint that the run has resumed from to the run directory."""
        mover = self.tiers.run_dir.mover
        if mover is not None:
            self._begin(step)
            mover.enqueue(step, meta, is_saved=True)

    def after_step(self, step: int, *, last: bool, saving: SavingState) -> None:
        """Begin a checkpoint if one is due. The last step is always saved.

        `saving` is what was still being written, equal on all ranks. Raises a CheckpointError if
        the previous checkpoint failed, and `checkpoint.on_error` is `stop`.
        """
        is_due = self.tiers.run_dir.is_due(step)
        to_node = self.tiers.node.is_due(step) and not (last or (is_due and self._avoids_nodes))
        if not (to_node or is_due or last):
            return
        self._drain_is_due |= to_node and is_due
        is_busy = saving.to_node if to_node else saving.to_run_dir
        if is_busy and self._skips and not last:
            self._skip(step)
        elif to_node:
            self._save_on_node(step)
        else:
            self.save(step)
            self._avoids_nodes = False

    def is_due(self, step: int) -> bool:
        """Whether the states are saved after this step even if it is not the last one."""
        return self.tiers.run_dir.is_due(step) or self.tiers.node.is_due(step)

    def save(self, step: int) -> None:
        """Begin a checkpoint in the run directory, unless this step is saved or being saved."""
        run_dir = self.tiers.run_dir
        if not run_dir.managers or (step == self.saved_step and self._will_be_drained(step)):
            return
        self._begin(step)
        with self._reporting_failure():
            run_dir.managers[0].begin(step, run_dir.shards(), self.meta())
        if self._config.mode == "blocking":
            self._announce_written()

    def replace(self, step: int) -> None:
        """Save a step again, because the counters that are saved with it have changed."""
        self.saved_step = None
        self.save(step)

    def finish(self) -> None:
        """Wait until all checkpoints are committed or have failed; raise as `handle_failure`."""
        for writer in self.tiers.writers:
            with self._reporting_failure():
                writer.close()
        for step in tuple(self.tiers.unannounced):
            self._announce(step)

    def end(self, step: int) -> None:
        """Do what `finish` does after the last step, but not forever, and delete copies in memory.

        Collective over all ranks. Also raises a CheckpointError if the run directory did not take
        the last step in time.
        """
        config, tiers, limit = self._config, self.tiers, self._config.end_seconds
        if tiers.node.managers and config.mode == "lazy" and limit is not None:
            end = BoundedEnd(self._run_config, self._world, self._store, tiers, limit)
            was_loaded = step == self.saved_step != self._begun_step
            if not end.wait(step, self.meta(), is_safe=was_loaded):
                return
        self.finish()
        tiers.remove_copies()

    def handle_failure(self) -> None:
        """Wait until this rank knows of the failure that a rank has reported, and handle it.

        Copies of node-local checkpoints go on in the background, unless the run ends. The next
        checkpoint in the run directory is written directly, because the nodes' disks may be the
        cause. Raises a CheckpointError if a checkpoint failed and `checkpoint.on_error` is `stop`,
        or no copy has reached the next node for `checkpoint.protection_minutes`.
        """
        for mover in self.tiers.movers:
            if mover.is_redundant:
                mover.poll()
        if self._stops:
            self.finish()
        for manager in self.tiers.managers:
            with self._reporting_failure():
                manager.close()
        for mover in self.tiers.movers:
            if not mover.is_redundant:
                with self._reporting_failure():
                    mover.poll()
        self._avoids_nodes = True
        self._announce_written()

    def _save_on_node(self, step: int) -> None:
        """Begin a checkpoint on the node's disk, and copy it on to the tiers that are due.

        Moments may be rounded only if the run directory gets no copy.
        """
        node, meta, is_drained = self.tiers.node, self.meta(), self._drain_is_due
        self._drain_is_due = False
        if is_drained:
            self._begin(step)
        for mover in self.tiers.movers:
            if is_drained or mover.is_redundant:
                mover.enqueue(step, meta)
        with self._reporting_failure():
            node.managers[0 if is_drained else -1].begin(step, node.shards(), meta)
        if self._config.mode == "blocking":
            self.finish()

    def _skip(self, step: int) -> None:
        self._skipped += 1
        if self._world.rank == 0 and not self._has_logged_skip:
            self._has_logged_skip = True
            _LOG.info(
                "step %d is not saved: the checkpoint before it is still being written "
                "(checkpoint.when_busy=skip; metrics.jsonl counts checkpoints_skipped)",
                step,
            )

    def _will_be_drained(self, step: int) -> bool:
        """Whether a step was written directly, or the nodes' disks have it."""
        mover = self.tiers.run_dir.mover
        if mover is None or step not in mover.spared():
            return True
        exact = self.tiers.node.managers[0]
        with self._reporting_failure():
            exact.wait()
        return exact.outcomes.get(step, "committed") == "committed"

    def _begin(self, step: int) -> None:
        """Take note that the run directory gets a step, directly or as a copy."""
        self.saved_step = self._begun_step = step
        self.tiers.unannounced.append(step)
        self.on_begin(step)

    def _announce_written(self) -> None:
        """Announce what was written directly. All ranks waited; what failed has failed on all."""
        for manager in self.tiers.run_dir.managers:
            for step in tuple(self.tiers.unannounced):
                if step in manager.outcomes:
                    self._announce(step)

    def _announce(self, step: int) -> None:
        try:
            if self.tiers.run_dir.outcome(step) == "committed":
                folder = shared_folder(self._run_config) / step_folder(step)
                self.on_committed(CommittedCheckpoint(step, folder))
        finally:
            self.tiers.unannounced.remove(step)

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Log and suppress a failure, or end the run, as `checkpoint.on_error` says."""
        try:
            yield
        except CheckpointError as error:
            if self._stops:
                raise
            if self._world.rank == 0 or isinstance(error.__cause__, NodeCommitError):
                _LOG.error("%s. The run continues (checkpoint.on_error=continue)", error)
