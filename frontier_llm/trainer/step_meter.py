"""Turns the result of a step into metrics: tokens/s, TFLOP/s, fractions of the device's peak."""

import logging
import math
import re
from dataclasses import asdict, dataclass, replace

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.geometry.flops import step_hardware_flops, step_model_flops
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.saving.checkpoints import Checkpoints
from frontier_llm.telemetry.metrics import StepMetrics
from frontier_llm.trainer.evaluate import Validation
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.step_result import StepResult

_LOG = logging.getLogger(__name__)
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
    """Model FLOPs utilisation: the share of the device's peak; None if the peak is unknown."""
    hfu: float | None
    """Hardware FLOPs utilisation: the same with recomputed activations."""


class Throughput:
    """The operations and tokens of one step, and the peak of the device in TFLOP/s, if it is known.

    `precision` is the compute precision after `auto` is resolved. `peak_description` has the peak
    with its source, or says why it is unknown.
    """

    def __init__(
        self, config: RunConfig, world_size: int, accelerator: Accelerator, precision: str
    ) -> None:
        data = config.data
        self._world_size, self.precision = world_size, precision
        lengths = sample_lengths(config.model, data)
        self._tokens = data.global_batch * lengths.total
        sizes = lengths, data.global_batch
        self._model_flops = step_model_flops(config.model, *sizes, data.pairs_read)
        self._hardware_flops = step_hardware_flops(
            config.model, *sizes, config.recompute, data.pairs_read
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
    """Return the peak of this device in TFLOP/s and its source, or None and why it is unknown.

    The peak of the cluster file is used only if the file describes the device that is present.
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


class StepMeter:
    """Makes a step's metrics. If it `logs`, it warns of impossible ones, such as an MFU above 1."""

    def __init__(
        self, throughput: Throughput, progress: Progress, checkpoints: Checkpoints, *, logs: bool
    ) -> None:
        self.throughput = throughput
        self._progress, self._checkpoints, self._logs = progress, checkpoints, logs

    def measure(
        self,
        result: StepResult,
        learning_rate: float,
        seconds: float,
        validation: Validation | None,
    ) -> StepMetrics:
        """Return the metrics of the last step, which `progress` has already counted."""
        progress = self._progress
        return StepMetrics(
            step=progress.step,
            loss=result.loss,
            z_loss=result.z_loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            tokens=progress.tokens,
            samples=progress.samples,
            step_seconds=seconds,
            **asdict(self.checked(self.throughput.of(seconds))),
            sent_bytes=result.sent,
            unquantised_bytes=result.unquantised,
            allocator_bytes=self.throughput.accelerator.allocator_bytes(),
            checkpoint_stall_seconds=self._checkpoints.take_stall_seconds(),
            checkpoints_skipped=self._checkpoints.take_skipped(),
            archive_failures=self._checkpoints.tiers.archive.take_failures(),
            steps_since_copy=self._checkpoints.steps_since_copy(progress.step),
            skipped=result.skipped,
            loss_scale=result.loss_scale if self.throughput.precision == "fp16" else None,
            validation_loss=None if validation is None else validation.loss,
            validation_bits_per_byte=None if validation is None else validation.bits_per_byte,
        )

    def checked(self, speed: Speed) -> Speed:
        """Return a speed without an MFU or HFU above 1, and log an error the first time.

        Such a value means that the configured peak of the device is wrong.
        """
        if max(speed.mfu or 0, speed.hfu or 0) <= 1:
            return speed
        if self._logs:
            self._logs = False
            _LOG.error(
                "MFU %.2f, HFU %.2f at step %d: a value above 1 means that "
                "cluster.device.peak_tflops is wrong for this device. Values above 1 are not "
                "written.",
                speed.mfu or math.nan,
                speed.hfu or math.nan,
                self._progress.step,
            )
        mfu, hfu = (None if (share or 0) > 1 else share for share in (speed.mfu, speed.hfu))
        return replace(speed, mfu=mfu, hfu=hfu)
