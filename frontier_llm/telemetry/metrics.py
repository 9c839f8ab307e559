"""The numbers of one step, and how they reach the sinks."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from frontier_llm.geometry.wire import Sent

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. A number that is not finite is written as null."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the step's samples, in nats a token."""
    grad_norm: float
    """Of the whole model, before clipping."""
    learning_rate: float
    """With which the step was made."""
    tokens: int
    """Consumed by the run so far."""
    samples: int
    """Consumed by the run so far."""
    step_seconds: float
    """Wall time of the step, and of saving after the one before; without validations."""
    tokens_per_second: float
    """Of the whole job."""
    model_tflops_per_device: float
    """TFLOP/s that the mathematics needs."""
    hardware_tflops_per_device: float
    """TFLOP/s executed, recomputation included."""
    mfu: float | None
    """Model FLOPs' share of the device's peak, 0 to 1; None where the peak is unknown."""
    hfu: float | None
    """Hardware FLOPs' share of the device's peak; None where the peak is unknown."""
    sent_bytes: Mapping[str, Sent]
    """Bytes that all ranks sent in this step, by collective and link."""
    unquantised_bytes: Mapping[str, Sent] = field(default_factory=dict)
    """Of the collectives that were quantised, what they would have sent in the compute format."""
    checkpoint_stall_seconds: float = 0.0
    """How long training waited for checkpoints since the line before."""
    skipped: bool = False
    """Whether the update was left out because a gradient was not finite."""
    loss_scale: float | None = None
    """fp16 only: the factor on the loss."""
    validation_loss: float | None = None
    """In nats a token; None where this step was not followed by a validation."""
    validation_bits_per_byte: float | None = None
    """The same per byte of the validation text, which makes tokenizers comparable."""

    plan: Mapping[str, Mapping[str, float | None]] | None = None
    """Once a run, in the step after which they are compared: `predicted` and `measured` by name."""

    def to_json(self) -> str:
        """Write the step as one line of strict JSON, without the line's end."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    def scalars(self) -> dict[str, float]:
        """Return all finite numbers under flat names: `sent_bytes/gradients/intra`."""
        return dict(_flatten("", _finite(asdict(self))))


class Sink(Protocol):
    """A place that metrics are written to."""

    def write(self, metrics: StepMetrics) -> None:
        """Take one step's numbers; steps come in ascending order."""

    def close(self) -> None:
        """Write what is still held back. Nothing is written after this."""


class Recorder:
    """Checks each step's numbers and hands them to every sink, in order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._peak_is_believed = True

    def write(self, metrics: StepMetrics) -> None:
        """Hand a step to all sinks; an MFU or HFU above 1 is withheld and reported once."""
        checked = self._without_impossible(metrics)
        for sink in self._sinks:
            sink.write(checked)

    def close(self) -> None:
        """Close all sinks, also those after one that fails; then raise the first failure."""
        failures = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _without_impossible(self, metrics: StepMetrics) -> StepMetrics:
        if max(metrics.mfu or 0, metrics.hfu or 0) <= 1:
            return metrics
        if self._peak_is_believed:
            self._peak_is_believed = False
            _LOG.error(
                "MFU %.2f, HFU %.2f at step %d: above 1, so cluster.device.peak_tflops is wrong "
                "for this device. Neither is written from here on where it is above 1.",
                metrics.mfu or math.nan,
                metrics.hfu or math.nan,
                metrics.step,
            )
        return replace(metrics, mfu=_possible(metrics.mfu), hfu=_possible(metrics.hfu))


def _possible(share: float | None) -> float | None:
    return share if share is not None and share <= 1 else None


def _finite(value: Any) -> Any:
    """Replace each float that JSON cannot say by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _flatten(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, float]]:
    flat: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            flat += _flatten(f"{prefix}{key}/", value)
        elif value is not None:
            flat.append((f"{prefix}{key}", float(value)))
    return flat
