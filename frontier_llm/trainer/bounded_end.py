"""The end of a run whose last checkpoint cannot be written to the run directory in time.

A file system that hangs blocks the threads that write to it, perhaps forever. If the nodes have
disks of their own for checkpoints, the main thread does not wait longer than
`checkpoint.end_seconds`. All ranks then save the states, which have not changed since the last
step, to the disks of the nodes, and the run ends with a message.
"""

import logging
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from frontier_llm.trainer.checkpoint_levels import Levels
from frontier_llm.trainer.checkpoint_places import local_root, shared_folder
from frontier_llm.units import format_seconds

if TYPE_CHECKING:
    from torch.distributed import Store

_LOG = logging.getLogger(__name__)
_PREFIX = "checkpoint/end"
_SLOWEST_SECONDS = 60.0
"""How much later than this rank the slowest rank may come to the end."""


class BoundedEnd:
    """Waits for the levels of one rank, but not forever. All ranks call its methods together."""

    def __init__(self, config: RunConfig, world: World, store: "Store", levels: Levels) -> None:
        """Initialise without waiting.

        Args:
            config: configuration of the run, with a limit (`checkpoint.end_seconds`).
            world: number, host and node of this rank among all ranks.
            store: key-value store of all ranks.
            levels: what writes and copies the checkpoints of this rank.
        """
        self._config, self._world, self._levels = config, world, levels
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it

    def wait(self, step: int, meta: Mapping[str, Any], *, is_safe: bool) -> bool:
        """Wait until everything is written and copied, or the time is over.

        Args:
            step: the last step, whose states this rank still holds.
            meta: plain JSON that is saved with the states.
            is_safe: whether the run directory has had the step since the start of the run.

        Returns:
            Whether every rank has written and copied everything, or knows why it has failed. If
            not, the run directory has at least the last step.

        Raises:
            CheckpointError: the run directory hangs and does not have the last step, or could not
                take it and `checkpoint.on_error` is `stop`.
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
        """Return the sums of two numbers over all ranks.

        Raises:
            CheckpointError: the store is lost, or a rank does not come.
        """
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
        """Save the states to the disks of the nodes, unless these have the step.

        Raises:
            CheckpointError: the disks of the nodes cannot be written either.
        """
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
        """Return why the last step was not written, as far as this rank knows."""
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
