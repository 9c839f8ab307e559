"""Notice other programs that compute on this machine while times are measured."""

import os
import time
from pathlib import Path

QUIET_CORES = 0.1
"""Other programs may use this many cores while times are measured."""
SAMPLE_SECONDS = 1.0
"""Time over which the load of an idle machine is sampled."""
_STAT = Path("/proc/stat")


def busy_seconds() -> float:
    """Return the seconds that all cores together have worked since the start of the machine.

    0 on systems without /proc/stat: then no load is noticed.
    """
    if not _STAT.exists():
        return 0.0
    # proc(5): user, nice, system, idle, iowait, irq, softirq, steal; the first two include guests
    ticks = [int(tick) for tick in _STAT.read_text().split()[1:9]]
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


def idle_share(busy: float, seconds: float) -> float | None:
    """Return the idle share of all cores in some seconds; None if it is unknown.

    `busy` is the increase of `busy_seconds`.
    """
    if not _STAT.exists():
        return None
    return max(0.0, 1 - busy / (seconds * (os.cpu_count() or 1)))  # clock ticks are coarse


def own_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def is_disturbed(busy: float, own: float, seconds: float) -> bool:
    """Return whether other programs have used more than `QUIET_CORES` cores in some seconds.

    `busy` is the increase of `busy_seconds`, `own` the CPU seconds of the processes that measure.
    """
    return busy - own > QUIET_CORES * seconds


def wait_until_quiet(limit_seconds: float) -> bool:
    """Wait until no other program computes; return False after the time limit.

    The processes that measure must not compute meanwhile.
    """
    end = time.monotonic() + limit_seconds
    while True:
        busy, start = busy_seconds(), time.monotonic()
        time.sleep(SAMPLE_SECONDS)
        if not is_disturbed(busy_seconds() - busy, 0.0, time.monotonic() - start):
            return True
        if time.monotonic() > end:
            return False
