"""The checkpoints of a run: when they are written, to which tier, and what a failure does."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.manager import CheckpointManager, Options
from frontier_llm.checkpoint.save import NodeCommitError
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import StateShard
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.checkpoint_places import local_folder, shared_folder

if TYPE_CHECKING:
    from torch.distributed import Store

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint in the run directory that is complete on disk."""

    step: int
    """Steps done."""
    folder: Path
    """Folder of the checkpoint. Retention or a rewind may remove it later."""


class CheckpointListener(Protocol):
    """Is told about checkpoints in the run directory, on the main thread of every rank."""

    def on_checkpoint_begin(self, step: int) -> None:
        """Run before a checkpoint begins to be written."""

    def on_checkpoint_committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Run when all ranks know that a checkpoint is committed."""


class Checkpoints:
    """Saves this rank's states after the steps at which a checkpoint is due.

    Every rank calls the same methods at the same steps. Commits are announced to the listener at
    the same point on all ranks: when the step's all-reduce shows that every rank's writer thread
    has seen the commit, or after a wait that ends with the commit on every rank.

    Attributes:
        saved_step: step of the newest checkpoint in the run directory that was begun.
        listener: told about checkpoints in the run directory; the loop sets it.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        store: "Store",
        states: ShardedStates,
        groups: Groups,
        meta: Callable[[], dict[str, Any]],
    ) -> None:
        """Prepare; nothing is written or allocated.

        Args:
            config: of the run.
            world: place of this rank among all ranks.
            store: key-value store of the ranks; it outlives this object.
            states: the states to save.
            groups: process groups of this rank.
            meta: returns what is saved in addition to the states, as plain JSON.
        """
        self._run_config, self._config = config, config.checkpoint
        self._world, self._store = world, store
        self._states, self._meta = states, meta
        self._copies = states.factors.data // states.factors.optimizer
        self._copy = states.factors.digits(groups.at.data).replica
        self._saves_locally = self._is_first_of_its_node(groups)
        self.saved_step: int | None = None
        self.listener: CheckpointListener | None = None
        self._unannounced: int | None = None
        chosen, node = config.checkpoint, world.node_ranks
        self._shared = self._make(
            shared_folder(config),
            chosen.keep,
            Options(
                keep_every_steps=chosen.keep_every_steps,
                file_ranks=node if chosen.files == "node" else None,
            ),
        )
        self._local = self._make(
            local_folder(config, world.rank, world.ranks_per_node),
            chosen.tiers.local.keep,
            Options(folder_ranks=node),
        )

    @property
    def failed(self) -> bool:
        """Whether this rank knows that its last checkpoint failed."""
        return any(manager.failed for manager in self._managers)

    @property
    def has_unannounced_commit(self) -> bool:
        """Whether this rank knows of a commit that the listener has not been told."""
        manager, step = self._shared, self._unannounced
        return manager is not None and step is not None and manager.committed_step == step

    def announce_commit(self) -> None:
        """Tell the listener about the last commit. Every rank knows of it and calls this."""
        step, self._unannounced = self._unannounced, None
        if step is not None and self.listener is not None:
            folder = shared_folder(self._run_config) / step_folder(step)
            self.listener.on_checkpoint_committed(CommittedCheckpoint(step, folder))

    def take_stall_seconds(self) -> float:
        """Return how long training waited for checkpoints since the last call."""
        return sum(manager.take_stall_seconds() for manager in self._managers)

    def before_update(self) -> None:
        """Wait until the states may change."""
        for manager in self._managers:
            manager.fence()

    def prepare(self) -> None:
        """Allocate host memory, so that a lack of it shows before the first step.

        Raises:
            CheckpointError: there is not enough memory.
        """
        for manager in self._managers:
            manager.prepare(self._shards(manager))

    def after_step(self, step: int, *, last: bool) -> None:
        """Begin a checkpoint if one is due.

        Args:
            step: the step that is done.
            last: whether it is the last step of the run, which is always saved.

        Raises:
            CheckpointError: the previous checkpoint failed, and `checkpoint.on_error` is `stop`.
        """
        if self._shared is not None and (last or step % self._config.every_steps == 0):
            self.save(step)
        elif self._local is not None and step % self._config.tiers.local.every_steps == 0:
            self._begin(self._local, step)

    def save(self, step: int) -> None:
        """Begin a checkpoint in the run directory, unless this step is saved or being saved."""
        if self._shared is not None and step != self.saved_step:
            self._begin(self._shared, step)
            self.saved_step = step

    def replace(self, step: int) -> None:
        """Save a step again, because its meta data have changed."""
        self.saved_step = None
        self.save(step)

    def finish(self) -> None:
        """Wait until the checkpoints being written are committed or have failed.

        Raises:
            CheckpointError: the last checkpoint failed, and `checkpoint.on_error` is `stop`.
        """
        for manager in self._managers:
            with self._reporting_failure():
                manager.close()
            if manager is self._shared:
                self._announce_after_wait()

    @property
    def _managers(self) -> Iterator[CheckpointManager]:
        yield from (m for m in (self._shared, self._local) if m is not None)

    def _begin(self, manager: CheckpointManager, step: int) -> None:
        with self._reporting_failure():
            manager.wait()  # reported here, so that the new checkpoint is begun all the same
        if manager is self._shared:
            self._announce_after_wait()
            self._unannounced = step
            if self.listener is not None:
                self.listener.on_checkpoint_begin(step)
        with self._reporting_failure():
            manager.begin(step, self._shards(manager), self._meta())
        if manager is self._shared and self._config.mode == "blocking":
            self._announce_after_wait()

    def _announce_after_wait(self) -> None:
        """Announce the checkpoint that was waited for, unless it failed (then on every rank)."""
        if self.has_unannounced_commit:
            self.announce_commit()
        self._unannounced = None

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Log a failure and suppress it, or let it end the run (`checkpoint.on_error`)."""
        try:
            yield
        except CheckpointError as error:
            if self._config.on_error == "stop":
                raise
            if self._world.rank == 0 or isinstance(error.__cause__, NodeCommitError):
                _LOG.error("%s. The run continues (checkpoint.on_error=continue)", error)

    def _shards(self, manager: CheckpointManager) -> Iterator[StateShard]:
        if manager is self._shared:
            return part_of(self._states.shards(), self._copy, self._copies)
        return self._states.shards() if self._saves_locally else iter(())

    def _is_first_of_its_node(self, groups: Groups) -> bool:
        """Return whether no lower rank of this node holds the same states."""

        def held(rank: int) -> tuple[int, ...]:
            at = groups.grid.coordinates(rank)
            digits = self._states.factors.digits(at.data)
            return at.tensor, at.pipeline, *digits[:-1]

        mine = held(groups.rank)
        return all(held(rank) != mine for rank in range(self._world.node_ranks.start, groups.rank))

    def _make(self, folder: Path | None, keep: int, options: Options) -> CheckpointManager | None:
        chosen, world = self._config, self._world
        if folder is None or chosen.mode == "off":
            return None
        return CheckpointManager(
            folder,
            world.rank,
            world.size,
            self._store,
            chosen.mode,
            keep,
            timedelta(seconds=chosen.timeout_seconds),
            replace(options, pool_bytes=chosen.pool_bytes, ranks_on_host=world.ranks_per_node),
        )


def part_of(shards: Iterable[StateShard], number: int, count: int) -> Iterator[StateShard]:
    """Yield one of `count` equal parts of the states that replicas hold in common.

    Args:
        shards: the shards of this rank; the same on all replicas. Shards that this rank does not
            count are left to the rank that does.
        number: of the part, from 0.
        count: number of parts.
    """
    shards = [shard for shard in shards if shard.record.counted]
    total = sum(shard.master.numel() for shard in shards)
    first, last = total * number // count, total * (number + 1) // count
    for shard in shards:
        begin, end = max(first, 0), min(last, shard.master.numel())
        if begin < end:
            states = (shard.master, shard.exp_avg, shard.exp_avg_sq)
            yield StateShard(
                shard.record, shard.start + begin, *(state[begin:end] for state in states)
            )
        first, last = first - shard.master.numel(), last - shard.master.numel()
