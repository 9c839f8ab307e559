"""Which ranks are slow: now and then all time the same product, and compare.

In a synchronous run every rank's step takes as long as the slowest one's, so steps alone do not
show who holds the others up. A product of two matrices that every rank times for itself does: a hot
device, a core that something else uses, a wrong power limit.
"""

import logging
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from frontier_llm.config.watchdog import WatchdogConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.parallel.world import World

_LOG = logging.getLogger(__name__)
_PROBE_SECONDS = 0.1
_SIZES = {"cpu": 256, "cuda": 4096, "hip": 4096}
"""Of the square matrices: some milliseconds at most, so that the median sees who is interrupted."""


class Stragglers:
    """Compares the ranks every so many steps; rank 0 names those that are slow twice in a row."""

    def __init__(self, config: WatchdogConfig, world: World, accelerator: Accelerator) -> None:
        self._config, self._world, self._accelerator = config, world, accelerator
        self._suspects: set[int] = set()

    def look(self, step: int) -> list[int]:
        """Compare, if this step is one of those; return the ranks that are slow again.

        Collective over all ranks: one all-reduce of a number a rank.

        Args:
            step: the one that has ended.
        """
        every = self._config.stragglers_every_steps
        if not every or step % every or self._world.size == 1:
            return []
        seconds = self._gather(self._probe())
        slow = set(slower_than(seconds, self._config.straggler_ratio))
        again = sorted(slow & self._suspects)
        self._suspects = slow
        if again and self._world.rank == 0:
            self._warn(step, again, seconds)
        return again

    def _warn(self, step: int, slow: Sequence[int], seconds: Sequence[float]) -> None:
        middle = median(seconds)
        for rank in slow:
            _LOG.warning(
                "step %d: %s is slow: the same product takes it %.1f times as long as the others",
                step,
                self._world.name_ranks([rank]),
                seconds[rank] / middle,
            )

    def _probe(self) -> float:
        """Return the median seconds of a product on this rank's device."""
        accelerator, size = self._accelerator, _SIZES[self._accelerator.kind]
        a = torch.ones(size, size, dtype=torch.float32, device=accelerator.device)
        torch.matmul(a, a)
        accelerator.synchronize()
        times: list[float] = []
        end = time.perf_counter() + _PROBE_SECONDS
        while (start := time.perf_counter()) < end or not times:
            torch.matmul(a, a)
            accelerator.synchronize()
            times.append(time.perf_counter() - start)
        return median(times)

    def _gather(self, seconds: float) -> list[float]:
        device = self._accelerator.device
        everyone = torch.zeros(self._world.size, dtype=torch.float64, device=device)
        everyone[self._world.rank] = seconds
        dist.all_reduce(everyone)
        return list(everyone.tolist())


def slower_than(seconds: Sequence[float], ratio: float) -> list[int]:
    """Return the indices whose time is more than `ratio` times the median."""
    limit = ratio * median(seconds)
    return [index for index, value in enumerate(seconds) if value > limit]
