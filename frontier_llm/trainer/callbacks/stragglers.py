"""Finds slow ranks: every few steps, all ranks time the same matrix product and compare.

Ranks wait for each other in every step, so all step times are as long as those of the slowest rank
and do not show which rank is slow. Therefore each rank also times a matrix product, for which it
waits for nobody. It is slow on a hot device, on a core that another process uses, or under a wrong
power limit.
"""

import logging
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from frontier_llm.launch.roster_store import LateRanks
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext

_LOG = logging.getLogger(__name__)
_PROBE_SECONDS = 0.1
"""How long a rank repeats the matrix product in one comparison."""
_SIZES = {"cpu": 256, "cuda": 4096, "hip": 4096}
"""Number of rows and columns of the matrices, by kind of device. A product takes milliseconds, so
that it is repeated many times in `_PROBE_SECONDS`."""


class Stragglers(Callback):
    """Compares the ranks every `watchdog.stragglers_every_steps` steps.

    A comparison is collective over all ranks: one all-reduce of one number per rank. Rank 0 logs
    the ranks that are slow in two comparisons in a row.
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
            step: number of the step that has ended.
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
            self._ask_for_others(step, again)
        return again

    def _ask_for_others(self, step: int, slow: Sequence[int]) -> None:
        """Let processes that wait take the places of slow ranks, if the configuration says so."""
        report = self.context.control.watchdog.report_late
        if self._config.replace_stragglers and report is not None:
            names = self._world.name_ranks(slow)
            report(LateRanks(slow, f"step {step}: {names} is slow and is replaced", elsewhere=True))

    def _warn(self, step: int, slow: Sequence[int], seconds: Sequence[float]) -> None:
        """Log the slow ranks, given the seconds of all ranks."""
        typical = median(seconds)
        for rank in slow:
            _LOG.warning(
                "step %d: %s is slow: a matrix product takes %.1f times the median of all ranks",
                step,
                self._world.name_ranks([rank]),
                seconds[rank] / typical,
            )

    def _probe(self) -> float:
        """Return the median seconds of a matrix product on this rank's device."""
        accelerator, size = self._accelerator, _SIZES[self._accelerator.kind]
        matrix = torch.ones(size, size, dtype=torch.float32, device=accelerator.device)
        torch.matmul(matrix, matrix)  # warm-up
        accelerator.synchronize()
        times: list[float] = []
        end = time.perf_counter() + _PROBE_SECONDS
        while (start := time.perf_counter()) < end or not times:
            torch.matmul(matrix, matrix)
            accelerator.synchronize()
            times.append(time.perf_counter() - start)
        return median(times)

    def _gather(self, seconds: float) -> list[float]:
        """Return the seconds of all ranks, in the order of the ranks."""
        device = self._accelerator.device
        by_rank = torch.zeros(self._world.size, dtype=torch.float64, device=device)
        by_rank[self._world.rank] = seconds
        dist.all_reduce(by_rank)
        return list(by_rank.tolist())


def slower_than(seconds: Sequence[float], ratio: float) -> list[int]:
    """Return the indices whose time is more than `ratio` times the median."""
    limit = ratio * median(seconds)
    return [index for index, value in enumerate(seconds) if value > limit]
