"""The dynamic loss scale of fp16 (arXiv:1710.03740, section 3.2).

Small gradients are 0 in fp16. Multiplying the loss by a scale makes gradients larger; the update
divides them by the scale again.
"""

from typing import Any

from frontier_llm.config.precision import PrecisionConfig


class LossScale:
    """The loss scale of a run.

    In fp16 it is halved after an overflow, and doubled after `growth_steps` steps in a row without
    an overflow. In other precisions it is always 1.

    Attributes:
        is_dynamic: whether the precision is fp16.
        value: factor by which the loss of the next step is multiplied.
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
        """Adapt the scale after a step. All ranks call this with the same value.

        Args:
            finite: whether all gradients of the step were finite.
        """
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
