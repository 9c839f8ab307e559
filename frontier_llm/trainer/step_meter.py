"""Turns the result of a step into the metrics that metrics.jsonl and other sinks record."""

import math

from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpora import Corpora
from frontier_llm.telemetry.metrics import StepMetrics, UtilizationCheck
from frontier_llm.trainer.checkpoints import Checkpoints
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
        corpus: Corpora,
        *,
        logs: bool,
    ) -> None:
        """Initialise.

        Args:
            config: configuration of the run.
            throughput: converts the duration of a step into tokens/s and TFLOP/s.
            progress: counters of the run.
            checkpoints: tells how long training waited for checkpoints.
            corpus: gives the bytes per token of the validation text.
            logs: whether this rank logs a warning about impossible values, such as more TFLOP/s
                than the peak of the device.
        """
        self._config, self._throughput = config, throughput
        self._progress, self._checkpoints = progress, checkpoints
        self._corpus = corpus
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
        validation_loss: float | None,
    ) -> StepMetrics:
        """Return the metrics of the last step, which `progress` has already counted.

        Args:
            result: result of the step.
            learning_rate: learning rate of the step.
            seconds: wall time of the step.
            validation_loss: loss of the validation after the step; None if there was none.
        """
        progress, speed = self._progress, self._throughput.of(seconds)
        metrics = StepMetrics(
            step=progress.step,
            loss=result.loss,
            z_loss=result.z_loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            tokens=progress.samples * self._throughput.tokens_per_sample,
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
            skipped=result.skipped,
            loss_scale=result.loss_scale if self._throughput.precision == "fp16" else None,
            validation_loss=validation_loss,
            validation_bits_per_byte=self._bits_per_byte(validation_loss),
        )
        return self._check(metrics)

    def _bits_per_byte(self, loss: float | None) -> float | None:
        """Return the validation loss in bits per byte of text.

        None if the model predicts only spans of the text, so that a loss per byte has no meaning.
        """
        if loss is None or self._config.data.objective == "spans":
            return None
        return loss / self._corpus.validation_bytes_per_token / math.log(2)
