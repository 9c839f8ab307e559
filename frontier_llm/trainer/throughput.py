"""Converts the duration of a step into tokens/s, TFLOP/s and fractions of the device's peak."""

import re
from dataclasses import dataclass

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.geometry.flops import step_hardware_flops, step_model_flops
from frontier_llm.geometry.lengths import sample_lengths

TERA = 1e12
"""Operations per second in one TFLOP/s."""


@dataclass(frozen=True)
class Speed:
    """The speed of one step."""

    tokens_per_second: float
    """Tokens per second of all devices together."""
    model_tflops_per_device: float
    """TFLOP/s per device, counting the operations of the model without recomputation."""
    hardware_tflops_per_device: float
    """TFLOP/s per device, counting recomputed activations as well."""
    mfu: float | None
    """Model FLOPs utilisation: `model_tflops_per_device` divided by the peak of the device; None if
    the peak is unknown."""
    hfu: float | None
    """Hardware FLOPs utilisation: `hardware_tflops_per_device` divided by the same peak."""


class Throughput:
    """The operations and tokens of one step, and the peak of the device.

    Attributes:
        accelerator: the device.
        precision: compute precision, after `auto` is resolved.
        peak_tflops: peak of the device in TFLOP/s; None if it is unknown.
        peak_description: the peak with its source, or why it is unknown.
    """

    def __init__(
        self, config: RunConfig, world_size: int, accelerator: Accelerator, precision: str
    ) -> None:
        data = config.data
        self._world_size, self.precision = world_size, precision
        tokens = sample_lengths(config.model, data.sequence_length).total
        self._tokens = data.global_batch * tokens
        self._model_flops = step_model_flops(config.model, data.sequence_length, data.global_batch)
        self._hardware_flops = step_hardware_flops(
            config.model, data.sequence_length, data.global_batch, config.recompute
        )
        self.accelerator = accelerator
        self.peak_tflops, self.peak_description = peak_tflops(config, accelerator, precision)

    def of(self, seconds: float) -> Speed:
        """Return the speed of a step that took `seconds`."""
        per_device = TERA * seconds * self._world_size
        model, hardware = self._model_flops / per_device, self._hardware_flops / per_device
        peak = self.peak_tflops
        return Speed(
            tokens_per_second=self._tokens / seconds,
            model_tflops_per_device=model,
            hardware_tflops_per_device=hardware,
            mfu=model / peak if peak else None,
            hfu=hardware / peak if peak else None,
        )


def peak_tflops(
    config: RunConfig, accelerator: Accelerator, precision: str
) -> tuple[float | None, str]:
    """Return the peak of this device in a precision, from the cluster file (conf/cluster).

    The peak of the cluster file is used only if it describes the device that is present.

    Returns:
        The peak in TFLOP/s, or None if it is unknown; and a text with the peak and its source, or
        why it is unknown.
    """
    device = config.cluster.device
    if device.kind != accelerator.kind or not re.search(device.name_pattern, accelerator.name):
        return None, (
            f"this device is {accelerator.name!r}, cluster={config.cluster.name} describes "
            f"{device.name!r}"
        )
    peak = device.peak_tflops.get(precision)  # type: ignore[call-overload]
    if peak is None:
        return None, f"cluster={config.cluster.name} gives no {precision} peak"
    return peak, f"{peak} TFLOP/s {precision} ({device.source})"
