"""Finds slow ranks: every few steps, all ranks time the same matrix product and compare.

In a synchronous run, the step of every rank takes as long as that of the slowest rank, so step
times do not show which rank is slow. A matrix product that each rank times by itself does: a hot
device, a core that another process uses, a wrong power limit.
"""

import logging
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext

_LOG = logging.getLogger(__name__)
_PROBE_SECONDS = 0.1
_SIZES = {"cpu": 256, "cuda": 4096, "hip": 4096}
"""Side of the square matrices. A product takes milliseconds, so that `_PROBE_SECONDS` hold many."""


class Stragglers(Callback):
    """Compares the ranks every `watchdog.stragglers_every_steps` steps.

    Collective over all ranks: one all-reduce with one number per rank. Rank 0 logs the ranks that
    are slow in two comparisons in a row.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._config, self._world = context.config.watchdog, context.world
        self._accelerator = context.hardware.accelerator
        self._suspects: set[int] = set()

    def on_step_end(self, end: StepEnd) -> None:
        """Compare the ranks, if a comparison is due after this step."""
        self.compare(end.metrics.step)

    def compare(self, step: int) -> list[int]:
        """Return the ranks that are slow for the second time in a row, if a comparison is due.

        Collective over all ranks.

        Args:
            step: the step that has ended.
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
                "step %d: %s is slow: a matrix product takes %.1f times the median of all ranks",
                step,
                self._world.name_ranks([rank]),
                seconds[rank] / middle,
            )

    def _probe(self) -> float:
        """Return the median seconds of a matrix product on this rank's device."""
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
