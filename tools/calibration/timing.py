"""How long something takes on this machine's device."""

import time
from collections.abc import Callable

import torch

SECONDS = 0.05
"""Of one measurement, at least."""
REPETITIONS = 3
"""Measurements, of which the fastest counts: others were disturbed."""


def device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Return the device's name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"a CPU with {torch.get_num_threads()} threads"


def seconds_of(action: Callable[[], object]) -> float:
    """Return the seconds of one call, once it is warm."""
    action()
    _finish()
    return min(_measure(action) for _ in range(REPETITIONS))


def _measure(action: Callable[[], object]) -> float:
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < SECONDS or not calls:
        action()
        calls += 1
        if calls % 16 == 0 or passed == 0:
            _finish()
    _finish()
    return (time.perf_counter() - start) / calls


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
