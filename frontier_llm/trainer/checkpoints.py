"""The checkpoints of a run as its loop sees them: when, to which tier, and what a failure means."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontier_llm.checkpoint.manager import CheckpointManager, Options
from frontier_llm.checkpoint.save import UnfollowedError
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.parallel.groups import Groups
from frontier_llm.parallel.world import World
from frontier_llm.protocols import StateShard
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.checkpoint_places import local_folder, shared_folder

if TYPE_CHECKING:
    from torch.distributed import Store

_LOG = logging.getLogger(__name__)


class Checkpoints:
    """Saves this rank's states, after the steps that are due.

    Every rank calls the same methods at the same steps. `saved_step` is the last step that was
    begun to be saved.
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
            world: this rank's place.
            store: where the ranks met; lives longer than this.
            states: what is saved.
            groups: where this rank stands; of what replicas share each saves a part.
            meta: what is saved beside the states, as of now: plain JSON.
        """
        self._config, self._world, self._store = config.checkpoint, world, store
        self._states, self._meta = states, meta
        self._copies = states.factors.data // states.factors.optimizer
        self._copy = states.factors.digits(groups.at.data).d
        self._saves_locally = self._is_first_of_its_node(groups)
        self.saved_step: int | None = None
        chosen, node = config.checkpoint, world.node_ranks
        self._shared = self._make(
            shared_folder(config),
            chosen.keep,
            Options(
                keep_every_steps=chosen.keep_every_steps,
                together=node if chosen.files == "node" else None,
            ),
        )
        self._local = self._make(
            local_folder(config, world.rank, world.ranks_per_node),
            chosen.tiers.local.keep,
            Options(sharing=node),
        )

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint is known to have failed, here."""
        return any(manager.failed for manager in self._managers)

    def take_stall_seconds(self) -> float:
        """Return how long training waited for checkpoints since it was last asked."""
        return sum(manager.take_stall_seconds() for manager in self._managers)

    def before_update(self) -> None:
        """Wait until the states may change."""
        for manager in self._managers:
            manager.fence()

    def prepare(self) -> None:
        """Allocate host memory now: better refused before the first step than after it.

        Raises:
            CheckpointError: there is not enough.
        """
        for manager in self._managers:
            manager.prepare(self._shards(manager))

    def after_step(self, step: int, *, last: bool) -> None:
        """Begin a checkpoint if one is due.

        Args:
            step: that is done.
            last: whether no other follows: then it is saved whatever its number.

        Raises:
            CheckpointError: the one before failed, and `checkpoint.on_error` is `stop`.
        """
        if self._shared is not None and (last or step % self._config.every_steps == 0):
            self.save(step)
        elif self._local is not None and step % self._config.tiers.local.every_steps == 0:
            self._begin(self._local, step)

    def save(self, step: int) -> None:
        """Begin a checkpoint in the run directory, unless this step's is there or under way."""
        if self._shared is not None and step != self.saved_step:
            self._begin(self._shared, step)
            self.saved_step = step

    def replace(self, step: int) -> None:
        """Save a step once more: what is saved beside its states has changed."""
        self.saved_step = None
        self.save(step)

    def settle(self) -> None:
        """Wait until nothing is being written, and hear of what went wrong.

        Raises:
            CheckpointError: the last checkpoint failed, and `checkpoint.on_error` is `stop`.
        """
        for manager in self._managers:
            with self._bearing():
                manager.close()

    @property
    def _managers(self) -> Iterator[CheckpointManager]:
        yield from (m for m in (self._shared, self._local) if m is not None)

    def _begin(self, manager: CheckpointManager, step: int) -> None:
        with self._bearing():
            manager.wait()  # its failure is not this checkpoint's
        with self._bearing():
            manager.begin(step, self._shards(manager), self._meta())

    @contextmanager
    def _bearing(self) -> Iterator[None]:
        """Report a failure, or let it end the run."""
        try:
            yield
        except CheckpointError as error:
            if self._config.on_error == "stop":
                raise
            if self._world.rank == 0 or isinstance(error.__cause__, UnfollowedError):
                _LOG.error("%s. The run goes on (checkpoint.on_error=continue)", error)

    def _shards(self, manager: CheckpointManager) -> Iterator[StateShard]:
        if manager is self._shared:
            return part_of(self._states.shards(), self._copy, self._copies)
        return self._states.shards() if self._saves_locally else iter(())

    def _is_first_of_its_node(self, groups: Groups) -> bool:
        """Whether no rank before it on its node holds the same states."""

        def held(rank: int) -> tuple[int, ...]:
            at = groups.grid.coordinates(rank)
            a, b, c, _ = self._states.factors.digits(at.data)
            return at.tensor, at.pipeline, a, b, c

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
            replace(options, pool_bytes=chosen.pool_bytes, neighbours=world.ranks_per_node),
        )


def part_of(shards: Iterable[StateShard], number: int, count: int) -> Iterator[StateShard]:
    """Yield one of `count` equally large parts of what ranks hold alike and count as theirs.

    Args:
        shards: the same on all of these ranks, but for their place in memory.
        number: of the part.
        count: of the parts.
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
