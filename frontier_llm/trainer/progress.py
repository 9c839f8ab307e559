"""The counters of a run and its loss scale, which a checkpoint stores besides the model states."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from frontier_llm.config.precision import PrecisionConfig


@dataclass
class Progress:
    """Counters with the same values on every rank. The next step is `step + 1`."""

    step: int = 0
    """Number of steps that have ended, including steps whose update was skipped."""
    next_sample: int = 0
    """Number of the first sample of the next step. It is larger than `samples` after a rewind (a
    return to an earlier checkpoint), because a rewind leaves samples out."""
    samples: int = 0
    """Number of samples with which the model has been trained."""
    tokens: int = 0
    """Number of tokens that the model has read in these samples, in encoder and decoder."""
    updates: int = 0
    """Number of steps whose update was not skipped. Adam's bias correction depends on it."""
    cross_attention_updates: int = 0
    """Number of updates of cross-attention alone (optimizer.cross_attention_steps)."""
    bad_steps: int = 0
    """Number of steps in a row, up to the last step, whose loss or gradient was not finite."""
    rewinds: int = 0
    """Number of rewinds after spikes of the loss."""
    recent_losses: Sequence[float] = ()
    """With `trainer.spike_factor`: losses of the last steps, at most `trainer.spike_window`."""

    def advance(self, samples: int, tokens_per_sample: int, *, skipped: bool, alone: int) -> None:
        """Count a step; up to step `alone`, cross-attention alone is updated."""
        self.step += 1
        self.next_sample += samples
        self.samples += samples
        self.tokens += samples * tokens_per_sample
        self.updates += not skipped
        self.cross_attention_updates += not skipped and self.step <= alone

    def to_meta(self) -> dict[str, Any]:
        """Return the counters as plain JSON for a checkpoint."""
        return asdict(self)

    def load_meta(self, meta: dict[str, Any], tokens_per_sample: int = 0) -> None:
        """Set the counters to those of a checkpoint.

        Older checkpoints lack losses, and tokens, which follow from the tokens per sample of that
        run.
        """
        for field in fields(self):
            setattr(self, field.name, meta.get(field.name, field.default))
        if "tokens" not in meta:
            self.tokens = self.samples * tokens_per_sample


class LossScale:
    """The dynamic loss scale of fp16 (arXiv:1710.03740, section 3.2); 1 in other precisions.

    Small gradients are 0 in fp16. Multiplying the loss by a scale makes gradients larger; the
    update divides them by the scale again. The scale is halved after an overflow, and doubled after
    `growth_steps` steps in a row without one. `value` is the scale of the next step.
    """

    def __init__(self, config: PrecisionConfig, precision: str) -> None:
        self.is_dynamic = precision == "fp16"
        self.value = config.initial_loss_scale if self.is_dynamic else 1.0
        self._minimum, self._growth_steps = config.minimum_loss_scale, config.growth_steps
        self._good_steps = 0

    @property
    def is_at_minimum(self) -> bool:
        """Whether the scale cannot be lowered after an overflow."""
        return not self.is_dynamic or self.value <= self._minimum

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step; on all ranks with the same value."""
        if not self.is_dynamic:
            return
        if not finite:
            self.value = max(self.value / 2, self._minimum)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_steps:
            self.value *= 2
            self._good_steps = 0

    def to_meta(self) -> dict[str, Any]:
        """Return the state as plain JSON for a checkpoint; empty without fp16."""
        return {"value": self.value, "good_steps": self._good_steps} if self.is_dynamic else {}

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Continue with the state in a checkpoint; keep the initial state if it has none."""
        if self.is_dynamic and meta:
            self.value, self._good_steps = meta["value"], meta["good_steps"]
