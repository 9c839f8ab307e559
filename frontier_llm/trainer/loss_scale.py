"""The dynamic loss scale of fp16 (arXiv:1710.03740, section 3.2)."""

from typing import Any

from frontier_llm.config.precision import PrecisionConfig


class LossScale:
    """Halves after an overflow, doubles after `growth_steps` good steps; constant 1 without fp16.

    Attributes:
        is_dynamic: whether the precision is fp16.
        value: factor on the loss of the next step.
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
        """Adapt the scale after a step. Every rank calls this with the same value."""
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
        """Take over the state of a checkpoint; keep the initial state if it was not fp16."""
        if self.is_dynamic and meta:
            self.value, self._good_steps = meta["value"], meta["good_steps"]
