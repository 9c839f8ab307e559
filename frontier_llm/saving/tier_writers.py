"""The places of a run's checkpoints on one rank: what writes and copies each of them.

    states -> host memory -> the node's disk -> the run directory -> the archive command
                             the node's disk -> the next node's disk (`checkpoint.partner`)

States are copied to the run directory directly if the nodes' disks do not have the step.
"""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from frontier_llm.checkpoint.archive import Archive
from frontier_llm.checkpoint.chunk_pool import SharedPool
from frontier_llm.checkpoint.commit_barrier import CommitBarrier
from frontier_llm.checkpoint.drain import DrainSource
from frontier_llm.checkpoint.manager import CheckpointManager, Mode
from frontier_llm.checkpoint.manager_options import Options, Outcome
from frontier_llm.checkpoint.mover import Copy, Mover
from frontier_llm.checkpoint.pacer import Cancellation, Pacer
from frontier_llm.checkpoint.partner import PartnerFiles
from frontier_llm.checkpoint.rank_objects import gathered
from frontier_llm.checkpoint.retention import prune
from frontier_llm.checkpoint.save import Task, save
from frontier_llm.checkpoint.write_plan import part_of
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.geometry.host_pool import CHUNK_BYTES, host_pool
from frontier_llm.geometry.partition import places_of_states
from frontier_llm.launch.world import World
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import StateShard
from frontier_llm.saving.tiers import (
    local_folder,
    local_root,
    partner_folder,
    shared_folder,
)
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.units import format_seconds

if TYPE_CHECKING:
    from torch.distributed import Store

_LOG = logging.getLogger(__name__)

_IN_FLIGHT = 8
"""Most unwritten checkpoints per level; host memory is the usual limit."""


class Levels:
    """The managers and movers of one rank, and the host memory that they share.

    Attributes:
        shared: writes states to the run directory; None without checkpoints.
        local: writes states to the node's disk; None without node-local checkpoints.
        reduced: as `local`, with moments in fewer bits; None without `checkpoint.moments`.
        drain: copies from the node's disk to the run directory; None without `local`.
        partner: copies to the next node's disk; None without `checkpoint.partner`.
        archive: runs the archive command on rank 0; it may outlive this object.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        store: "Store",
        states: ShardedStates,
        groups: Groups,
        archive: Archive | None = None,
    ) -> None:
        self._run_config, self._config = config, config.checkpoint
        self._world, self._store, self._states = world, store, states
        # a replica is a set of data-parallel ranks that together hold all optimizer states once
        self._replicas = states.factors.data // states.factors.optimizer
        self._replica = states.factors.digits(groups.coordinates.data).replica
        # a rank saves its states to the disk of its node, unless a lower rank of the node has them
        places = places_of_states(groups.grid, states.factors)
        self._saves_locally = places[world.rank] not in places[world.node_ranks.start : world.rank]
        self._timeout = timedelta(seconds=config.checkpoint.timeout_seconds)
        self._buffers: list[torch.Tensor] = []
        self._cancellation = Cancellation()
        self._partner_files: PartnerFiles | None = None
        self._pool = self._make_pool()
        settings = config.checkpoint
        self._shared_folder = shared_folder(config)
        self._local_folder = local_folder(config, world.rank, world.ranks_per_node)
        self.archive = archive or Archive(settings.tiers.archive, self._shared_folder)
        self.shared = self.local = self.reduced = self.drain = self.partner = None
        if settings.mode == "off":
            return
        self.shared = self._make_shared(settings.mode)
        if self._local_folder is not None:
            self.drain = self._make_mover("drain", "the run directory", self._drain)
            if settings.partner and self._has_next_node():
                self.partner = self._make_mover("partner", "the next node", self._copy_to_partner)
                self.partner.is_redundant = True
                if settings.protection_minutes is not None:
                    self.partner.patience_seconds = 60 * settings.protection_minutes
            on_node = Options(folder_ranks=world.node_ranks, spared=self._spared_on_node)
            keep, folder = settings.tiers.local.keep, self._local_folder
            exact = replace(on_node, on_end=self._saved_locally)
            self.local = self._make_manager(folder, settings.mode, keep, exact)
            if settings.moments != "fp32":
                rounded = replace(on_node, moments=settings.moments)
                self.reduced = self._make_manager(folder, settings.mode, keep, rounded)

    @property
    def managers(self) -> Iterator[CheckpointManager]:
        """The managers that exist."""
        if self.shared is not None:
            yield self.shared
        yield from self.node_managers

    @property
    def node_managers(self) -> Iterator[CheckpointManager]:
        """The managers that write to the node's disk."""
        yield from (manager for manager in (self.local, self.reduced) if manager is not None)

    @property
    def movers(self) -> Iterator[Mover]:
        """The movers that exist."""
        yield from (mover for mover in (self.drain, self.partner) if mover is not None)

    @property
    def pool_bytes(self) -> int:
        """Host memory in bytes that `prepare` allocates."""
        return self._pool.size

    def prepare(self) -> None:
        """Plan the files of this rank and allocate the host memory, before the first step.

        Collective over all ranks. Raises a CheckpointError if there is not enough memory.
        """
        if self.shared is not None:
            self.shared.prepare(self.shared_shards())
        for manager in self.node_managers:
            manager.prepare(self.local_shards())
        while len(self._buffers) < self._movers:
            buffer = self._pool.buffers.take()
            assert buffer is not None  # host_pool has counted it
            self._buffers.append(buffer)
        if self.local is not None and self.partner is not None and self._partner_files is None:
            assert self._local_folder is not None
            world = self._world
            self._partner_files = PartnerFiles(
                self.local.plan,
                self._local_folder,
                world.rank,
                (world.rank + world.ranks_per_node) % world.size,
                (world.rank - world.ranks_per_node) % world.size,
                self._store,
                world.master_address,
                self._timeout,
            )

    def abandon(self) -> None:
        """Give up what is not committed, and wait until no thread uses states or files."""
        self._cancellation.cancel()
        if self._partner_files is not None:
            self._partner_files.close()
        for manager in self.managers:
            manager.abandon()
        for mover in self.movers:
            mover.abandon()

    def remove_copies(self) -> None:
        """Delete the copies in memory, which nothing writes any more. Collective over all ranks."""
        root = local_root(self._run_config)
        if root is None or not self._run_config.recovery.partner_copies:
            return
        gathered(None)  # wait, because simulated nodes share the folder
        if self._world.rank == self._world.node_ranks.start:
            shutil.rmtree(root, ignore_errors=True)

    def shared_shards(self) -> Iterator[StateShard]:
        """Yield what this rank saves to the run directory."""
        return part_of(self._states.shards(), self._replica, self._replicas)

    def local_shards(self) -> Iterator[StateShard]:
        """Yield what this rank saves to the disk of its node."""
        return self._states.shards() if self._saves_locally else iter(())

    def _make_pool(self) -> SharedPool:
        saved_bytes, local = self._states.saved_bytes, self._saves_locally
        counts = host_pool(self._config, saved_bytes, self._replicas, saves_locally=local)
        self._movers = counts.movers
        shard = next(self._states.shards(), None)
        device = torch.device("cpu") if shard is None else next(iter(shard.states.values())).device
        return SharedPool(counts.buffers, CHUNK_BYTES, device)

    def _make_shared(self, mode: Mode) -> CheckpointManager:
        settings, world = self._config, self._world
        options = Options(
            keep_every_steps=settings.keep_every_steps,
            file_ranks={"rank": None, "node": world.node_ranks}[settings.files],
            spared=lambda: {*self.archive.spared(), *(self.drain.active() if self.drain else ())},
            on_end=self._archive_commit,
        )
        return self._make_manager(self._shared_folder, mode, settings.keep, options)

    def _spared_on_node(self) -> set[int]:
        """Return the steps on the node's disk that a thread reads or writes."""
        writing = {step for manager in self.node_managers for step in tuple(manager.unfinished)}
        return writing.union(*(mover.spared() for mover in self.movers))

    def _make_manager(
        self, folder: Path, mode: Mode, keep: int, options: Options
    ) -> CheckpointManager:
        world = self._world
        return CheckpointManager(
            folder,
            world.rank,
            world.size,
            self._store,
            mode,
            keep,
            self._timeout,
            replace(
                options,
                pool=self._pool,
                ranks_on_host=world.ranks_per_node,
                in_flight=_IN_FLIGHT,
            ),
        )

    def _make_mover(self, name: str, target: str, copy: Copy) -> Mover:
        every = self._config.keep_every_steps
        return Mover(
            name,
            target,
            self._world.rank,
            self._world.size,
            self._store,
            self._timeout,
            copy,
            is_permanent=lambda step: every is not None and step % every == 0,
        )

    def _make_pacer(self) -> Pacer:
        rate = self._config.drain_mb_per_second
        limit = None if rate is None else rate * 1e6 / self._world.ranks_per_node
        return Pacer(limit, self._cancellation)

    def _saved_locally(self, step: int, outcome: Outcome) -> None:
        for mover in self.movers:
            mover.saved(step, outcome)

    def _archive_commit(self, step: int, outcome: Outcome) -> None:
        if outcome == "committed" and self._world.rank == 0:
            self.archive.committed(step)

    def _drain(self, step: int, meta: dict[str, Any], barrier: CommitBarrier) -> None:
        """Copy this rank's part of a checkpoint to the run directory, and commit the copy."""
        assert self.shared is not None
        assert self._local_folder is not None
        plan, rank = self.shared.plan, self._world.rank
        folder, everyone = self._shared_folder, range(self._world.size)
        buffers = self._buffers[0], self._buffers[1]
        pacer = self._make_pacer()
        pacer.start_thread()
        source = DrainSource(plan, self._local_folder, step, buffers, pacer, self._timeout)
        task = Task(folder, step, meta, rank, plan, everyone, repeats=False, continues=True)
        save(task, source, barrier)
        if task.is_first:
            every = self._config.keep_every_steps
            prune(folder, step, self._config.keep, every, self.archive.spared())
        self._archive_commit(step, "committed")

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

    def _copy_to_partner(self, step: int, meta: dict[str, Any], barrier: CommitBarrier) -> None:
        """Send this rank's file to the next node, and write and commit that of the node before."""
        world, files = self._world, self._partner_files
        assert files is not None
        node = files.sender // world.ranks_per_node
        folder = partner_folder(self._run_config, node)
        task = Task(
            folder,
            step,
            meta,
            world.rank,
            files.plan,
            world.node_ranks,
            repeats=True,
            cancellation=self._cancellation,
        )
        with files.sending(step, self._buffers[2], self._make_pacer()):
            save(task, files.receive(step, self._buffers[3]), barrier)
        if task.is_first:
            prune(folder, step, self._config.tiers.local.keep, None)


_PREFIX = "checkpoint/end"
_SLOWEST_SECONDS = 60.0
"""How much later than this rank the slowest rank may come to the end."""


class BoundedEnd:
    """Ends a run whose last checkpoint cannot be written to the run directory in time.

    A file system that hangs blocks the threads that write to it, perhaps forever. If the nodes have
    disks of their own for checkpoints, the main thread does not wait longer than
    `checkpoint.end_seconds`. All ranks then save the states, which have not changed since the last
    step, to the disks of the nodes, and the run ends with a message. All ranks call its methods
    together.
    """

    def __init__(self, config: RunConfig, world: World, store: "Store", levels: Levels) -> None:
        self._config, self._world, self._levels = config, world, levels
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it

    def wait(self, step: int, meta: Mapping[str, Any], *, is_safe: bool) -> bool:
        """Wait until everything is written and copied, or the time is over.

        `is_safe`: the run directory has had the step since the start of the run. Returns whether
        every rank has written and copied everything, or knows why it has failed. If not, the run
        directory has at least the last step. Raises a CheckpointError if it does not have this step
        because it hangs, or could not take it and `checkpoint.on_error` is `stop`.
        """
        limit = self._config.checkpoint.end_seconds
        assert limit is not None
        deadline = time.monotonic() + limit
        levels = self._levels
        waits = [manager.wait_for for manager in levels.managers]
        waits += [mover.wait_for for mover in levels.movers]
        is_done = all([wait(max(0.0, deadline - time.monotonic())) for wait in waits])
        is_safe = is_safe or any(
            level is not None and level.outcomes.get(step) == "committed"
            for level in (levels.shared, levels.drain)
        )
        late, unsafe = self._sum(limit, int(not is_done), int(not is_safe))
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

    def _sum(self, limit: float, late: int, unsafe: int) -> tuple[int, int]:
        """Return the sums of two numbers over all ranks; raise a CheckpointError if one is lost."""
        try:
            self._store.add(f"{_PREFIX}/late", late)
            self._store.add(f"{_PREFIX}/unsafe", unsafe)
            if self._store.add(f"{_PREFIX}/arrived", 1) == self._world.size:
                self._store.set(f"{_PREFIX}/all", "")
            self._store.wait([f"{_PREFIX}/all"], timedelta(seconds=limit + _SLOWEST_SECONDS))
            return self._store.add(f"{_PREFIX}/late", 0), self._store.add(f"{_PREFIX}/unsafe", 0)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"the ranks cannot end the run together: {reason}") from None

    def _save_on_nodes(self, step: int, meta: Mapping[str, Any]) -> None:
        local, partner = self._levels.local, self._levels.partner
        assert local is not None
        if step in local.outcomes:
            return
        if self._world.rank == 0:
            _LOG.warning("step %d is written to the disks of the nodes instead", step)
        if partner is not None:
            partner.enqueue(step, dict(meta))
        local.begin(step, self._levels.local_shards(), dict(meta))
        local.wait()  # no update follows, so there is nothing to fence
        if partner is not None:
            partner.wait_for(self._config.checkpoint.end_seconds)

    def _reason(self) -> str:
        try:
            if self._levels.shared is not None:
                self._levels.shared.poll()
        except CheckpointError as error:
            return f" ({error})"
        return ""

    def _message(self, step: int, *, is_late: bool) -> str:
        config, levels = self._config, self._levels
        limit = format_seconds(config.checkpoint.end_seconds or 0)
        cause = (
            f"did not take step {step} within {limit} (checkpoint.end_seconds)"
            if is_late
            else f"could not take step {step}{self._reason()}"
        )
        kept = [
            old
            for level in (levels.shared, levels.drain)
            for old, outcome in (dict(level.outcomes) if level is not None else {}).items()
            if outcome == "committed"
        ]
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
