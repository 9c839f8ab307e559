"""Measure durations on the device of this rank, at the same time on all ranks."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

SECONDS = 0.04
"""Minimum duration of one measurement, in seconds."""
REPETITIONS = 5
"""Number of measurements. Their median counts, as a step takes about as long as the median step:
the fastest measurement may have run at a higher clock speed, and other programs slow down some."""


def device() -> torch.device:
    """Return the GPU of this rank, or the CPU of a machine without a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Return the name of the device."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"a CPU with {threads} {'thread' if threads == 1 else 'threads'} per rank"


def seconds_of(action: Callable[[], object]) -> float:
    """Return the seconds of one call of `action`. A first call, as warm-up, is not measured.

    If there are several ranks, all measure the same action at the same time, as in training: ranks
    share the memory of the machine, and on a CPU its caches and its clock speed.
    """
    action()
    finish()
    if dist.is_initialized():
        dist.barrier()
    return median(_measure(action) for _ in range(REPETITIONS))


def finish() -> None:
    """Wait until the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _measure(action: Callable[[], object]) -> float:
    """Return the average seconds of a call over calls that take at least `SECONDS` together."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS or not calls:
        action()
        calls += 1
        if calls % 16 == 0:  # a GPU only queues the calls, which takes less time than running them
            finish()
    finish()
    return (time.perf_counter() - start) / calls
