"""Measure durations on the device of this machine."""

import time
from collections.abc import Callable

import torch

SECONDS = 0.05
"""Minimum duration of one measurement, in seconds."""
REPETITIONS = 3
"""Number of measurements. Only the fastest counts, because other processes can slow down some."""


def device() -> torch.device:
    """Return the GPU, or the CPU of a machine without a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Return the name of the device."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"a CPU with {torch.get_num_threads()} threads"


def seconds_of(action: Callable[[], object]) -> float:
    """Return the seconds of one call of `action`. A first call, as warm-up, is not measured."""
    action()
    _finish()
    return min(_measure(action) for _ in range(REPETITIONS))


def _measure(action: Callable[[], object]) -> float:
    """Return the average seconds of a call over calls that take at least `SECONDS` together."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS or not calls:
        action()
        calls += 1
        if calls % 16 == 0:  # a GPU only queues the calls, which takes less time than running them
            _finish()
    _finish()
    return (time.perf_counter() - start) / calls


def _finish() -> None:
    """Wait until the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
