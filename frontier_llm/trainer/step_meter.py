"""Turns the result of a step into the metrics that metrics.jsonl and other sinks record."""

from frontier_llm.config.run import RunConfig
from frontier_llm.telemetry.metrics import StepMetrics, UtilizationCheck
from frontier_llm.trainer.checkpoints import Checkpoints
from frontier_llm.trainer.evaluate import Validation
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.step_result import StepResult
from frontier_llm.trainer.throughput import Throughput


class StepMeter:
    """Makes the metrics of a step from its result, its duration and the counters of the run."""

    def __init__(
        self,
        config: RunConfig,
        throughput: Throughput,
        progress: Progress,
        checkpoints: Checkpoints,
        *,
        logs: bool,
    ) -> None:
        """Initialise.

        Args:
            config: configuration of the run.
            throughput: converts the duration of a step into tokens/s and TFLOP/s.
            progress: counters of the run.
            checkpoints: tells how long training waited for checkpoints.
            logs: whether this rank logs a warning about impossible values, such as more TFLOP/s
                than the peak of the device.
        """
        self._config, self._throughput = config, throughput
        self._progress, self._checkpoints = progress, checkpoints
        self._check = UtilizationCheck(logs=logs)

    @property
    def peak_description(self) -> str:
        """Peak TFLOP/s of the device with its source, or why the peak is unknown."""
        return self._throughput.peak_description

    def measure(
        self,
        result: StepResult,
        learning_rate: float,
        seconds: float,
        validation: Validation | None,
    ) -> StepMetrics:
        """Return the metrics of the last step, which `progress` has already counted.

        Args:
            result: result of the step.
            learning_rate: learning rate of the step.
            seconds: wall time of the step.
            validation: result of the evaluation after the step; None if there was none.
        """
        progress, speed = self._progress, self._throughput.of(seconds)
        metrics = StepMetrics(
            step=progress.step,
            loss=result.loss,
            z_loss=result.z_loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            tokens=progress.tokens,
            samples=progress.samples,
            step_seconds=seconds,
            tokens_per_second=speed.tokens_per_second,
            model_tflops_per_device=speed.model_tflops_per_device,
            hardware_tflops_per_device=speed.hardware_tflops_per_device,
            mfu=speed.mfu,
            hfu=speed.hfu,
            sent_bytes=result.sent,
            unquantised_bytes=result.unquantised,
            allocator_bytes=self._throughput.accelerator.allocator_bytes(),
            checkpoint_stall_seconds=self._checkpoints.take_stall_seconds(),
            checkpoints_skipped=self._checkpoints.take_skipped(),
            archive_failures=self._checkpoints.take_archive_failures(),
            steps_since_copy=self._checkpoints.steps_since_copy(progress.step),
            skipped=result.skipped,
            loss_scale=result.loss_scale if self._throughput.precision == "fp16" else None,
            validation_loss=None if validation is None else validation.loss,
            validation_bits_per_byte=None if validation is None else validation.bits_per_byte,
        )
        return self._check(metrics)
