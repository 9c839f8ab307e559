"""Define the numbers that a run records per step, and the interface of the sinks.

A sink is a destination of these numbers, such as metrics.jsonl, the console or Weights & Biases.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from frontier_llm.geometry.wire import Sent

BITS_PER_BYTE = "bits per byte of text, over all tokens"
"""What `bits_per_byte` in trainer/evaluate.py computes, for people."""


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one step, which are one line of metrics.jsonl.

    A number that is not finite is written as null.
    """

    step: int
    """Number of the step, counted from 1."""
    loss: float
    """Mean cross entropy over the samples of the step, in nats per token, without z-loss."""
    grad_norm: float
    """L2 norm of the gradient of the whole model, before clipping."""
    learning_rate: float
    tokens: int
    """Tokens that the run has trained on so far."""
    samples: int
    """Samples that the run has trained on so far."""
    step_seconds: float
    """Wall time of the step and of saving after the previous step, without validation."""
    tokens_per_second: float
    """Throughput of all ranks together."""
    model_tflops_per_device: float
    """TFLOP/s per device. Only the operations that the model needs are counted."""
    hardware_tflops_per_device: float
    """TFLOP/s per device. All executed operations are counted, including recomputation."""
    mfu: float | None
    """`model_tflops_per_device` divided by the device's peak; None if the peak is unknown."""
    hfu: float | None
    """`hardware_tflops_per_device` divided by the device's peak; None if the peak is unknown."""
    sent_bytes: Mapping[str, Sent]
    """For each collective, the bytes that all ranks sent in this step, inside and between nodes."""
    unquantised_bytes: Mapping[str, Sent] = field(default_factory=dict)
    """For each quantised collective, the bytes that it would have sent in the compute format."""
    allocator_bytes: Mapping[str, int] = field(default_factory=dict)
    """On a GPU: peak bytes of rank 0 so far that torch's allocator has `allocated` for tensors and
    has `reserved` on the device. Empty on a CPU."""
    checkpoint_stall_seconds: float = 0.0
    """Seconds that training has waited for checkpoints since the previous line."""
    checkpoints_skipped: int = 0
    """Checkpoints that were due since the previous line and not begun, because the one before was
    still being written (`checkpoint.when_busy=skip`)."""
    archive_failures: int = 0
    """How many times the archive command (`checkpoint.tiers.archive.command`) has failed since the
    previous line."""
    steps_since_copy: int | None = None
    """Steps since the newest checkpoint of which the next node has a copy (`checkpoint.partner`,
    `recovery.partner_copies`): what the loss of a node costs. None before the first copy."""
    z_loss: float | None = None
    """Mean z-loss over the samples of the step, which training adds to the loss; None without
    z-loss."""
    skipped: bool = False
    """Whether the update was skipped because a gradient was not finite."""
    loss_scale: float | None = None
    """Factor by which the loss is multiplied in fp16; None in other precisions."""
    validation_loss: float | None = None
    """Validation loss after the step, in nats per token; None if no validation followed it."""
    validation_bits_per_byte: float | None = None
    """Validation loss in bits per byte (`BITS_PER_BYTE`), which is comparable between tokenizers.
    None for span corruption, which does not predict every token."""
    plan: Mapping[str, Mapping[str, float | None]] | None = None
    """For each quantity, the value that the planner `predicted` and the value that the run
    `measured`. Present only in the step after which they are compared."""

    def to_json(self) -> str:
        """Return the step as one line of strict JSON, without a newline."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    def scalars(self) -> dict[str, float]:
        """Return all finite numbers under flat names such as `sent_bytes/gradients/intra`."""
        return dict(_flatten("", _finite(asdict(self))))


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, metrics: StepMetrics) -> None:
        """Write the numbers of one step. Steps come in ascending order."""

    def close(self) -> None:
        """Write all buffered data. No step is written afterwards. May be called twice."""


def _finite(value: Any) -> Any:
    """Replace each float that is not finite, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _flatten(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return (name, number) of all numbers; the names of nested mappings are joined by slashes."""
    flat: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            flat += _flatten(f"{prefix}{key}/", value)
        elif value is not None:
            flat.append((f"{prefix}{key}", float(value)))
    return flat
