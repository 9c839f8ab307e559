"""The checkpoints of a run: when they are written, to which tier, and what a failure does.

There are two tiers: the run directory, which all nodes share, and optionally a local disk of each
node (`checkpoint.tiers.local`). frontier_llm/checkpoint writes the files.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.manager import CheckpointManager, Options
from frontier_llm.checkpoint.replica_part import part_of
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
    """Number of optimizer steps done."""
    folder: Path
    """Folder of the checkpoint. It may be deleted later, when newer checkpoints replace it, or be
    renamed, when the run goes back to an earlier step."""


class CheckpointListener(Protocol):
    """An object that is told about checkpoints in the run directory.

    It is called on the main thread of every rank.
    """

    def on_checkpoint_begin(self, step: int) -> None:
        """Run before a checkpoint begins to be written."""

    def on_checkpoint_committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Run when all ranks know that a checkpoint is committed."""


class Checkpoints:
    """Saves this rank's states after the steps at which a checkpoint is due.

    Every rank calls the same methods at the same steps. Writer threads learn of a commit at
    different times, but all ranks tell the listener at the same point of the run: after the step
    whose all-reduce shows that every rank knows of the commit, or after all ranks have waited for
    the commit.

    Attributes:
        saved_step: step of the newest checkpoint in the run directory that was begun.
        listener: told about checkpoints in the run directory; the training loop sets it.
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
        """Initialise the managers of both tiers without writing or allocating anything.

        Args:
            config: configuration of the run.
            world: number, host and node of this rank among all ranks.
            store: torch's key-value store of all ranks; it outlives this object.
            states: the states to save.
            groups: process groups of this rank.
            meta: returns what is saved in addition to the states, as plain JSON.
        """
        self._run_config, self._config = config, config.checkpoint
        self._world, self._store = world, store
        self._states, self._meta = states, meta
        # a replica is a set of data-parallel ranks that together hold all optimizer states once
        self._replicas = states.factors.data // states.factors.optimizer
        self._replica = states.factors.digits(groups.coordinates.data).replica
        self._saves_locally = self._is_first_of_its_node(groups)
        self.saved_step: int | None = None
        self.listener: CheckpointListener | None = None
        self._unannounced: int | None = None
        """Step of a checkpoint in the run directory whose outcome the listener does not know."""
        settings, node = config.checkpoint, world.node_ranks
        self._shared = self._make_manager(
            shared_folder(config),
            settings.keep,
            Options(
                keep_every_steps=settings.keep_every_steps,
                file_ranks=node if settings.files == "node" else None,
            ),
        )
        self._local = self._make_manager(
            local_folder(config, world.rank, world.ranks_per_node),
            settings.tiers.local.keep,
            Options(folder_ranks=node),
        )

    @property
    def failed(self) -> bool:
        """Whether this rank knows that its last checkpoint failed."""
        return any(manager.failed for manager in self._managers)

    @property
    def has_unannounced_commit(self) -> bool:
        """Whether this rank knows of a commit about which the listener has not been told."""
        manager, step = self._shared, self._unannounced
        return manager is not None and step is not None and manager.committed_step == step

    def announce_commit(self) -> None:
        """Tell the listener about the last commit. All ranks call this, since all know of it."""
        step, self._unannounced = self._unannounced, None
        if step is not None and self.listener is not None:
            folder = shared_folder(self._run_config) / step_folder(step)
            self.listener.on_checkpoint_committed(CommittedCheckpoint(step, folder))

    def take_stall_seconds(self) -> float:
        """Return how many seconds training waited for checkpoints since the last call."""
        return sum(manager.take_stall_seconds() for manager in self._managers)

    def before_update(self) -> None:
        """Wait until the states may change, because a checkpoint no longer needs them."""
        for manager in self._managers:
            manager.fence()

    def prepare(self) -> None:
        """Allocate host memory, so that a lack of memory is found before the first step.

        Raises:
            CheckpointError: there is not enough memory.
        """
        for manager in self._managers:
            manager.prepare(self._shards(manager))

    def after_step(self, step: int, *, last: bool) -> None:
        """Begin a checkpoint if one is due.

        Args:
            step: the step that has just ended.
            last: whether no step follows. The last step is always saved.

        Raises:
            CheckpointError: the previous checkpoint failed, and `checkpoint.on_error` is `stop`.
        """
        if last or self._is_due(self._shared, step):
            self.save(step)
        elif self._local is not None and self._is_due(self._local, step):
            self._begin(self._local, step)

    def is_due(self, step: int) -> bool:
        """Whether the states are saved after this step even if it is not the last one."""
        return self._is_due(self._shared, step) or self._is_due(self._local, step)

    def save(self, step: int) -> None:
        """Begin a checkpoint in the run directory, unless this step is saved or being saved."""
        if self._shared is not None and step != self.saved_step:
            self._begin(self._shared, step)
            self.saved_step = step

    def replace(self, step: int) -> None:
        """Save a step again, because the counters that are saved with it have changed."""
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

    def _is_due(self, manager: CheckpointManager | None, step: int) -> bool:
        settings = self._config if manager is self._shared else self._config.tiers.local
        return manager is not None and step % settings.every_steps == 0

    @property
    def _managers(self) -> Iterator[CheckpointManager]:
        yield from (m for m in (self._shared, self._local) if m is not None)

    def _begin(self, manager: CheckpointManager, step: int) -> None:
        with self._reporting_failure():
            manager.wait()  # a failure of the last checkpoint must not prevent the new one
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
        """Tell the listener about the checkpoint after a wait for it, unless the checkpoint failed.

        A failed checkpoint has failed on every rank, so no rank announces it.
        """
        if self.has_unannounced_commit:
            self.announce_commit()
        self._unannounced = None

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Handle a failure as `checkpoint.on_error` says: log and suppress it, or end the run."""
        try:
            yield
        except CheckpointError as error:
            if self._config.on_error == "stop":
                raise
            if self._world.rank == 0 or isinstance(error.__cause__, NodeCommitError):
                _LOG.error("%s. The run continues (checkpoint.on_error=continue)", error)

    def _shards(self, manager: CheckpointManager) -> Iterator[StateShard]:
        """Return the shards that this rank saves in the tier of a manager."""
        if manager is self._shared:
            return part_of(self._states.shards(), self._replica, self._replicas)
        return self._states.shards() if self._saves_locally else iter(())

    def _is_first_of_its_node(self, groups: Groups) -> bool:
        """Return whether no lower rank of this node holds the same optimizer states."""

        def place_of_states(rank: int) -> tuple[int, ...]:
            """Return a tuple that is equal for ranks that hold the same optimizer states."""
            coordinates = groups.grid.coordinates(rank)
            digits = self._states.factors.digits(coordinates.data)
            return coordinates.tensor, coordinates.pipeline, *digits[:-1]  # all but the replica

        own_place = place_of_states(groups.rank)
        lower_ranks = range(self._world.node_ranks.start, groups.rank)
        return all(place_of_states(rank) != own_place for rank in lower_ranks)

    def _make_manager(
        self, folder: Path | None, keep: int, options: Options
    ) -> CheckpointManager | None:
        """Make the manager of a tier; return None if nothing is saved there."""
        settings, world = self._config, self._world
        if folder is None or settings.mode == "off":
            return None
        return CheckpointManager(
            folder,
            world.rank,
            world.size,
            self._store,
            settings.mode,
            keep,
            timedelta(seconds=settings.timeout_seconds),
            replace(options, pool_bytes=settings.pool_bytes, ranks_on_host=world.ranks_per_node),
        )
