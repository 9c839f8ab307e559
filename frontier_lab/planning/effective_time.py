"""Simulate the effective training time: the share of time in which a run makes new steps.

It is also called goodput or ETTR, the effective training time ratio (arXiv:2410.21680). Failures
arrive at a constant rate per node (exponential times between them), and also hit recoveries.

Formulas: Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps" (2006).
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

RATES = {"llama3": 419 / (54 * 2048), "rsc1": 6.50e-3, "rsc2": 2.34e-3}
"""Published failures per node-day, of nodes with 8 GPUs. llama3: 419 unexpected interruptions in 54
days on 16,384 GPUs (arXiv:2407.21783). rsc1, rsc2: two research clusters (arXiv:2410.21680)."""
DAY = 86400.0
LONGEST_INTERVAL = DAY
"""Longest interval between checkpoints in seconds, also if no failure needs a checkpoint."""
FAILURES = 10_000
"""Simulated failures. The error of the share that is not effective is about 1% of this share."""
SEARCH_FACTORS = tuple(2 ** (exponent / 3) for exponent in range(-6, 7))
"""Intervals that are simulated to find the best one, relative to Daly's."""


@dataclass(frozen=True)
class Recovery:
    """A way to recover from failures."""

    name: str
    stall: float
    """Seconds that training waits for a checkpoint."""
    seconds: float
    """Seconds from a failure until training continues."""
    keeps_steps: bool = False
    """Whether the work since the last checkpoint survives, except for the step in flight."""
    fallback_share: float = 0.0
    """Share of the failures after which the run restarts from the run directory instead."""
    fallback_seconds: float = 0.0
    """Seconds from such a failure until training continues."""
    checkpoints_per_durable: int = 1
    """Checkpoints per checkpoint that also reaches the run directory."""
    spares: int = 0
    """Nodes that wait to replace others."""

    @property
    def intervals_lost(self) -> float:
        """Intervals whose work a failure can lose, on average: it loses half of them on average."""
        restarted = 0.0 if self.keeps_steps else 1 - self.fallback_share
        return restarted + self.fallback_share * self.checkpoints_per_durable


@dataclass(frozen=True)
class Shares:
    """Shares of the time of a run by their purpose; their sum is 1."""

    effective: float
    """Making steps that are kept."""
    stalled: float
    """Waiting for checkpoints."""
    repeated: float
    """Making steps that a failure loses."""
    recovering: float
    """From a failure until training continues."""


def job_mtbf(failures_per_node_day: float, nodes: int) -> float:
    """Return the mean seconds between failures of a job; infinite below 1e-9 failures per day."""
    rate = failures_per_node_day * nodes
    return DAY / rate if rate >= 1e-9 else math.inf


def young_interval(stall: float, mtbf: float) -> float:
    """Return Young's optimum of the seconds of training between checkpoints: sqrt(2 stall mtbf)."""
    return math.sqrt(2 * stall * mtbf) if stall else 0.0


def daly_interval(stall: float, mtbf: float) -> float:
    """Return Daly's higher-order optimum of the seconds of training between checkpoints.

    `young (1 + x / 3 + x^2 / 9) - stall` with `x = sqrt(stall / (2 mtbf))`; `mtbf` if the stall is
    at least twice the mtbf.
    """
    if stall >= 2 * mtbf:
        return mtbf
    x = math.sqrt(stall / (2 * mtbf))
    return young_interval(stall, mtbf) * (1 + x / 3 + x**2 / 9) - stall


def daly_share(recovery: Recovery, mtbf: float, interval: float) -> float | None:
    """Return the effective share by Daly's complete model; None if it does not fit the recovery.

    It is exact for exponential failures that lose the work since the last checkpoint, also during
    recovery: `interval / (mtbf exp(seconds / mtbf) (exp((interval + stall) / mtbf) - 1))`.
    """
    if recovery.keeps_steps or recovery.fallback_share:
        return None
    if math.isinf(mtbf):
        return interval / (interval + recovery.stall)
    lasts = (interval + recovery.stall) / mtbf
    return interval / mtbf * math.exp(-recovery.seconds / mtbf - lasts) / -math.expm1(-lasts)


def simulate(recovery: Recovery, mtbf: float, step: float, steps: int, seed: int = 0) -> Shares:
    """Simulate a run from failure to failure. Equal arguments give equal results.

    The same failures are drawn for every interval, so that results for several intervals compare.
    `mtbf` is the mean of the seconds between failures of the job (infinite = none), `step` the
    seconds of a step, and `steps` the number of steps between checkpoints.
    """
    interval = steps * step
    cycle = interval + recovery.stall
    if math.isinf(mtbf):
        return Shares(interval / cycle, recovery.stall / cycle, 0.0, 0.0)
    draw = random.Random(seed)
    time = recovering = trained = lost = 0.0
    since, drained = 0.0, 0  # training since the last checkpoint; checkpoints since a durable one
    left = draw.expovariate(1 / mtbf)
    for _ in range(FAILURES):
        time += left
        whole = int((left + since) // cycle)
        if whole:  # checkpoints are saved before the failure
            left -= whole * cycle - since
            trained += whole * interval - since
            since, drained = 0.0, (drained + whole) % recovery.checkpoints_per_durable
        worked = min(left, interval - since)
        trained += worked
        since += worked
        down, falls_back, left = _recover(recovery, draw, mtbf)
        time += down
        recovering += down
        if falls_back:
            lost += since + drained * interval
            since, drained = 0.0, 0
        else:
            kept = int(since / step + 1e-9) * step if recovery.keeps_steps else 0.0
            lost += since - kept
            since = kept
    effective = max(0.0, trained - lost)
    stalled = max(0.0, time - recovering - trained)
    return Shares(effective / time, stalled / time, lost / time, recovering / time)


def _recover(recovery: Recovery, draw: random.Random, mtbf: float) -> tuple[float, bool, float]:
    """Recover from a failure. Another failure meanwhile begins the recovery again.

    Returns seconds until training continues, whether the run restarted from the run directory, and
    the seconds of training until the next failure.
    """
    down, falls_back = 0.0, False
    while True:
        falls_back = draw.random() < recovery.fallback_share or falls_back
        needed = recovery.fallback_seconds if falls_back else recovery.seconds
        until_failure = draw.expovariate(1 / mtbf)
        if until_failure >= needed:
            return down + needed, falls_back, until_failure - needed
        down += until_failure


def optima(recovery: Recovery, mtbf: float) -> tuple[float, float]:
    """Return Young's and Daly's interval in seconds, at most `LONGEST_INTERVAL`.

    Both assume that each failure loses the work since the last checkpoint. If it loses fewer or
    more intervals on average, the time between failures is divided by their number.
    """
    if math.isinf(mtbf) or not recovery.intervals_lost:
        return LONGEST_INTERVAL, LONGEST_INTERVAL
    scaled = mtbf / recovery.intervals_lost
    found = young_interval(recovery.stall, scaled), daly_interval(recovery.stall, scaled)
    return min(found[0], LONGEST_INTERVAL), min(found[1], LONGEST_INTERVAL)


def curve(
    recovery: Recovery, mtbf: float, step: float, seed: int = 0
) -> Iterator[tuple[int, Shares]]:
    """Yield numbers of steps between checkpoints around Daly's interval, with their shares."""
    _, centre = optima(recovery, mtbf)
    for steps in sorted({steps_of(centre * factor, step) for factor in SEARCH_FACTORS}):
        yield steps, simulate(recovery, mtbf, step, steps, seed)


def steps_of(interval: float, step: float) -> int:
    """Return the number of steps that is nearest to an interval in seconds; at least 1."""
    return max(1, round(min(interval, LONGEST_INTERVAL) / step))
