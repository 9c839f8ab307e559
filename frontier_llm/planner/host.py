"""Predict the time that the CPU of a rank needs to start the work of its device.

The CPU starts the kernels of a pass one after the other and runs ahead of the device. If the
kernels are short, the device waits for it, so a pass takes at least as long as its work on the CPU.
The two times vary from layer to layer, so passes for which both are about equal take a little
longer than either: (device^5 + host^5)^(1/5) seconds. On a cluster without devices one core does
both, so the times add up.
"""

from frontier_llm.config.cluster import DeviceConfig
from frontier_llm.config.engine import EngineConfig, HostTimes

SHARPNESS = 5
"""Exponent that joins the times of the device and of the CPU. With a larger one, the longer of the
two would count alone."""
OURS = EngineConfig().name
"""Name of the engine that describes this program."""
NO_HOST = HostTimes(layer_us=0, tensor_us=0, tensor_rank_us=0, micro_batch_us=0, step_us=0)
"""Times on a cluster without devices, where the CPU computes itself."""


def host_times(device: DeviceConfig, engine: EngineConfig, precision: str) -> HostTimes:
    """Return the times of the CPU: those of the engine, or those that were measured on the machine.

    Measured times are those of this program, so they do not hold for another engine.
    """
    measured = device.calibration.host.get(precision)  # type: ignore[call-overload]
    if measured is not None and engine.name == OURS:
        times: HostTimes = measured
        return times
    return NO_HOST if device.kind == "cpu" else engine.host


class Host:
    """Seconds of a rank's CPU."""

    def __init__(self, times: HostTimes, tensor: int) -> None:
        """Read the times of an engine.

        Args:
            times: times of the engine.
            tensor: number of tensor ranks.
        """
        collectives_us = times.tensor_us + times.tensor_rank_us * (tensor - 1) if tensor > 1 else 0
        self.layer_seconds = 1e-6 * (times.layer_us + collectives_us)
        self.backward_seconds = self.layer_seconds * times.backward_share
        self.micro_batch_seconds = 1e-6 * times.micro_batch_us
        self.step_seconds = 1e-6 * times.step_us


def with_host(device_seconds: float, host_seconds: float) -> float:
    """Return the seconds of a pass that takes some time on the device and some on the CPU."""
    longer = max(device_seconds, host_seconds)
    if longer == 0:
        return 0.0
    shorter = min(device_seconds, host_seconds) / longer
    seconds: float = longer * (1 + shorter**SHARPNESS) ** (1 / SHARPNESS)
    return seconds
