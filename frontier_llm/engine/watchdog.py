"""Ends a run that hangs, and says which rank waits where."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from frontier_llm.errors import ConfigError
from frontier_llm.health.watchdog import Limits
from frontier_llm.health.watchdog import Watchdog as HealthWatchdog
from frontier_llm.launch.world import World


class Watchdog:
    """Watches the training loop of each rank, from `with Watchdog(folder) as watchdog:` on.

    If a step exceeds its limit on any rank, every rank writes where it is to FOLDER/stall.txt, and
    all ranks end. A step may also take 10 times the median of the last 20 steps. Raises a
    ConfigError if the ranks were not started by torchrun or srun.

    Args:
        folder: for the diagnosis. It is made if it is absent.
        step_seconds: limit of a step.
        first_step_seconds: limit of each of the first three steps.
        other_seconds: limit of anything else between two steps.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        step_seconds: float = 60.0,
        first_step_seconds: float = 600.0,
        other_seconds: float = 1800.0,
    ) -> None:
        world = World.from_environment(os.environ)
        if world is None:
            raise ConfigError(
                "Watchdog",
                "no variables of torchrun or srun in the environment",
                "the number and host of each rank",
                "start the ranks with torchrun or srun",
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
        limits = Limits(
            other_seconds, first_step_seconds, step_seconds, other_seconds, other_seconds
        )
        store = PrefixStore("frontier_llm", _get_default_store())
        self._watchdog = HealthWatchdog(limits, world, store, Path(folder), Path(folder))

    def __enter__(self) -> "Watchdog":
        self._watchdog.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watchdog.__exit__(*error)

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return a context for a step, counted from 1."""
        return self._watchdog.phase("step", number)
