"""Ends a run whose last checkpoint cannot be written to the run directory in time."""

import logging
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import Store

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
