"""What writes checkpoints to the tiers of a run on one rank, and the memory that the writers share.

A tier is written from the states by a `CheckpointManager`, or from the node's disk by a `Mover`.
"""

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from frontier_llm.checkpoint.archive import Archive
from frontier_llm.checkpoint.chunk_pool import SharedPool
from frontier_llm.checkpoint.commit_barrier import CommitBarrier, Ranks
from frontier_llm.checkpoint.drain import DrainSource
from frontier_llm.checkpoint.manager import CheckpointManager, Mode
from frontier_llm.checkpoint.mover import Copy, Mover
from frontier_llm.checkpoint.pacer import Cancellation, Pacer
from frontier_llm.checkpoint.partner import PartnerFiles
from frontier_llm.checkpoint.rank_objects import gathered
from frontier_llm.checkpoint.retention import prune
from frontier_llm.checkpoint.save import Task, save
from frontier_llm.checkpoint.write_plan import part_of
from frontier_llm.checkpoint.writer import CheckpointWriter, Options, Outcome
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.host_pool import CHUNK_BYTES, host_pool
from frontier_llm.geometry.partition import places_of_states
from frontier_llm.launch.world import World
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import StateShard
from frontier_llm.saving.tiers import (
    NEXT_NODE,
    NODE_DISK,
    RUN_DIRECTORY,
    Tier,
    local_root,
    shared_folder,
    tiers_of,
)
from frontier_llm.sharding.sharded_states import ShardedStates

_IN_FLIGHT = 8
"""Most unwritten checkpoints per manager; host memory is the usual limit."""


@dataclass
class TierWriter:
    """What writes to one tier on this rank. A tier that the run does not use has no writers."""

    every_steps: int = 1
    shards: Callable[[], Iterator[StateShard]] = lambda: iter(())
    """Returns the states that this rank writes to the tier."""
    managers: list[CheckpointManager] = field(default_factory=list)
    """The first one writes exact states, the last one may round moments (`checkpoint.moments`)."""
    mover: Mover | None = None

    @property
    def writers(self) -> list[CheckpointWriter]:
        """The managers and the mover."""
        return [*self.managers, *([self.mover] if self.mover is not None else [])]

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written from states or host memory."""
        return any(manager.is_writing for manager in self.managers)

    def is_due(self, step: int) -> bool:
        """Whether the tier gets a checkpoint of a step from the states, or could get one."""
        return bool(self.managers) and step % self.every_steps == 0

    def outcome(self, step: int) -> Outcome | None:
        """Return how the tier's checkpoint of a step ended; None if this rank does not know."""
        found = (writer.outcomes.get(step) for writer in self.writers)
        return next((outcome for outcome in found if outcome is not None), None)

    def committed(self) -> list[int]:
        """Return the steps that the tier has got since the start of the run."""
        ends = [end for writer in self.writers for end in dict(writer.outcomes).items()]
        return [step for step, outcome in ends if outcome == "committed"]


class TierWriters:
    """The writers of all tiers of one rank, and the host memory that they share.

    Attributes:
        archive: runs the archive command on rank 0; it may outlive this object.
        unannounced: steps of checkpoints in the run directory whose end was not announced. A user's
            callbacks may want to read them, and until then they are not deleted.
        managers: all that write states; `movers`: all that copy; `writers`: both.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        store: Store,
        states: ShardedStates,
        groups: Groups,
        archive: Archive | None = None,
    ) -> None:
        self._run_config, self._config = config, config.checkpoint
        self._world, self._states = world, states
        # a replica is a set of data-parallel ranks that together hold all optimizer states once
        self._replicas = states.factors.data // states.factors.optimizer
        self._replica = states.factors.digits(groups.coordinates.data).replica
        # a rank saves its states to the disk of its node, unless a lower rank of the node has them
        places = places_of_states(groups.grid, states.factors)
        self._saves_locally = places[world.rank] not in places[world.node_ranks.start : world.rank]
        timeout = timedelta(seconds=config.checkpoint.timeout_seconds)
        self._ranks = Ranks(world.rank, world.size, store, timeout)
        self._buffers: list[torch.Tensor] = []
        self._cancellation = Cancellation()
        self._partner_files: PartnerFiles | None = None
        self._pool = self._make_pool()
        self.unannounced = deque[int]()
        self.archive = archive or Archive(self._config.tiers.archive, shared_folder(config))
        node, nodes = world.rank // world.ranks_per_node, -(-world.size // world.ranks_per_node)
        self._tiers = {tier.name: tier for tier in tiers_of(config, node, nodes)}
        self.run_dir, self.node, self.next_node = TierWriter(), TierWriter(), TierWriter()
        if self._config.mode != "off":
            self._make_writers(self._config.mode)
        self.managers = [*self.run_dir.managers, *self.node.managers]
        movers = self.run_dir.mover, self.next_node.mover
        self.movers = [mover for mover in movers if mover is not None]
        self.writers: list[CheckpointWriter] = [*self.managers, *self.movers]

    def prepare(self) -> None:
        """Plan the files of this rank and allocate the host memory, before the first step.

        Collective over all ranks. Raises a CheckpointError if there is not enough memory.
        """
        for tier in (self.run_dir, self.node):
            for manager in tier.managers:
                manager.prepare(tier.shards())
        while len(self._buffers) < self._mover_buffers:
            buffer = self._pool.buffers.take()
            assert buffer is not None  # host_pool has counted it
            self._buffers.append(buffer)
        if self.next_node.mover is not None and self._partner_files is None:
            plan, folder = self.node.managers[0].plan, self._tiers[NODE_DISK].folder
            pacer = self._make_pacer()
            self._partner_files = PartnerFiles(plan, folder, self._world, self._ranks, pacer)

    def prune(self, step: int) -> None:
        """Delete what the tiers need not keep beside the step from which the run has resumed.

        A start with a larger `checkpoint.keep` may have kept more. If they fill the disk, no
        checkpoint can be written, after which they would be deleted.
        """
        world, spared = self._world, {step, *self._unread()}
        for tier in self._tiers.values() if self._config.mode != "off" else ():
            writer = {RUN_DIRECTORY: 0, NODE_DISK: world.node_ranks.start}.get(tier.name)
            if world.rank == writer:
                prune(tier.folder, step, tier.keep, tier.keep_every_steps, spared)

    def abandon(self) -> None:
        """Give up what is not committed, and wait until no thread uses states or files."""
        self._cancellation.cancel()
        if self._partner_files is not None:
            self._partner_files.close()
        for writer in self.writers:
            writer.abandon()

    def remove_copies(self) -> None:
        """Delete the copies in memory, which nothing writes any more. Collective over all ranks."""
        root = local_root(self._run_config)
        if root is None or not self._run_config.recovery.partner_copies:
            return
        gathered(None)  # wait, because simulated nodes share the folder
        if self._world.rank == self._world.node_ranks.start:
            shutil.rmtree(root, ignore_errors=True)

    def _make_pool(self) -> SharedPool:
        saved_bytes, local = self._states.saved_bytes, self._saves_locally
        counts = host_pool(self._config, saved_bytes, self._replicas, saves_locally=local)
        self._mover_buffers = counts.movers
        shard = next(self._states.shards(), None)
        device = torch.device("cpu") if shard is None else next(iter(shard.states.values())).device
        return SharedPool(counts.buffers, CHUNK_BYTES, device)

    def _make_writers(self, mode: Mode) -> None:
        settings, world, tier = self._config, self._world, self._tiers[RUN_DIRECTORY]
        options = Options(
            keep_every_steps=tier.keep_every_steps,
            file_ranks={"rank": None, "node": world.node_ranks}[settings.files],
            spared=self._spared_in_run_dir,
            on_end=self._archive_commit,
        )
        manager = self._make_manager(tier, mode, options)
        self.run_dir = TierWriter(tier.every_steps, self._part_of_replica, [manager])
        node = self._tiers.get(NODE_DISK)
        if node is None:
            return
        self.run_dir.mover = self._make_mover("drain", tier, self._drain)
        if settings.partner and self._has_next_node():
            copy = self._copy_to_partner
            self.next_node.mover = self._make_mover("partner", self._tiers[NEXT_NODE], copy)
        options = Options(folder_ranks=world.node_ranks, spared=self._spared_on_node)
        exact = self._make_manager(node, mode, replace(options, on_end=self._saved_on_node))
        self.node = TierWriter(node.every_steps, self._states_of_node, [exact])
        if settings.moments != "fp32":
            rounded = replace(options, moments=settings.moments)
            self.node.managers.append(self._make_manager(node, mode, rounded))

    def _make_manager(self, tier: Tier, mode: Mode, options: Options) -> CheckpointManager:
        per_host = self._world.ranks_per_node
        options = replace(options, pool=self._pool, ranks_on_host=per_host, in_flight=_IN_FLIGHT)
        return CheckpointManager(tier.folder, self._ranks, mode, tier.keep, options)

    def _make_mover(self, name: str, target: Tier, copy: Copy) -> Mover:
        every = self._config.keep_every_steps
        mover = Mover(
            name,
            target.name,
            self._ranks,
            copy,
            is_permanent=lambda step: every is not None and step % every == 0,
        )
        mover.is_redundant = target.is_redundant
        if self._config.protection_minutes is not None:
            mover.patience_seconds = 60 * self._config.protection_minutes
        return mover

    def _part_of_replica(self) -> Iterator[StateShard]:
        return part_of(self._states.shards(), self._replica, self._replicas)

    def _states_of_node(self) -> Iterator[StateShard]:
        return self._states.shards() if self._saves_locally else iter(())

    def _spared_in_run_dir(self) -> set[int]:
        return self._unread().union(self.run_dir.mover.queued() if self.run_dir.mover else ())

    def _unread(self) -> set[int]:
        """Return the steps in the run directory that archive and callbacks have not read yet."""
        callbacks = tuple(self.unannounced) if self._run_config.callbacks else ()
        return {*self.archive.spared(), *callbacks}

    def _spared_on_node(self) -> set[int]:
        """Return the steps on the node's disk that a thread reads or writes."""
        writing = {step for manager in self.node.managers for step in tuple(manager.unfinished)}
        return writing.union(*(mover.spared() for mover in self.movers))

    def _saved_on_node(self, step: int, outcome: Outcome) -> None:
        for mover in self.movers:
            mover.saved(step, outcome)

    def _archive_commit(self, step: int, outcome: Outcome) -> None:
        if outcome == "committed" and self._world.rank == 0:
            self.archive.committed(step)

    def _make_pacer(self) -> Pacer:
        rate = self._config.drain_mb_per_second
        limit = None if rate is None else rate * 1e6 / self._world.ranks_per_node
        return Pacer(limit, self._cancellation)

    def _drain(self, step: int, meta: dict[str, Any], barrier: CommitBarrier) -> None:
        """Copy this rank's part of a checkpoint to the run directory, and commit the copy."""
        tier, plan = self._tiers[RUN_DIRECTORY], self.run_dir.managers[0].plan
        node, buffers = self._tiers[NODE_DISK].folder, (self._buffers[0], self._buffers[1])
        pacer = self._make_pacer()
        pacer.start_thread()
        source = DrainSource(plan, node, step, buffers, pacer, self._ranks.timeout)
        rank, everyone = self._world.rank, range(self._world.size)
        task = Task(tier.folder, step, meta, rank, plan, everyone, repeats=False, continues=True)
        save(task, source.chunks(), barrier)
        if task.is_first:
            prune(tier.folder, step, tier.keep, tier.keep_every_steps, self._unread())
        self._archive_commit(step, "committed")

    def _copy_to_partner(self, step: int, meta: dict[str, Any], barrier: CommitBarrier) -> None:
        """Write and commit the file of the node before; the next node reads that of this rank."""
        tier, world, files = self._tiers[NEXT_NODE], self._world, self._partner_files
        assert files is not None
        task = Task(
            tier.folder,
            step,
            meta,
            world.rank,
            files.plan,
            world.node_ranks,
            repeats=True,
            cancellation=self._cancellation,
        )
        save(task, files.receive(step, self._buffers[2]), barrier)
        if task.is_first:
            prune(tier.folder, step, tier.keep, tier.keep_every_steps)

    def _has_next_node(self) -> bool:
        """Return whether there is a next node; refuse a setting that needs one."""
        world, recovery = self._world, self._run_config.recovery
        if world.size == world.ranks_per_node and recovery.partner_copies:
            return False
        if world.size % world.ranks_per_node or world.size == world.ranks_per_node:
            key = "recovery.partner_copies" if recovery.partner_copies else "checkpoint.partner"
            raise ConfigError(
                key,
                f"true with {world.size} ranks, {world.ranks_per_node} per node",
                "at least two nodes, with equally many ranks",
                f"set {key}=false, or use more nodes",
            )
        return True
