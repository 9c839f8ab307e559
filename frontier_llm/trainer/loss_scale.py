"""fp16's dynamic loss scale: as large as does not overflow (arXiv:1710.03740, section 3.2)."""

from typing import Any

from frontier_llm.config.precision import PrecisionConfig


class LossScale:
    """Halves on an overflow, doubles after `growth_steps` good steps; constant 1 without fp16."""

    def __init__(self, config: PrecisionConfig, precision: str) -> None:
        self.is_dynamic = precision == "fp16"
        self.value = config.initial_loss_scale if self.is_dynamic else 1.0
        self._minimum, self._growth_steps = config.minimum_loss_scale, config.growth_steps
        self._good_steps = 0

    @property
    def is_at_minimum(self) -> bool:
        """Whether an overflow can no longer be answered by a smaller scale."""
        return not self.is_dynamic or self.value <= self._minimum

    def update(self, finite: bool) -> None:
        """Adapt to a step. Every rank calls this with the same verdict."""
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
        """Return what a checkpoint keeps of it; nothing without fp16."""
        return {"value": self.value, "good_steps": self._good_steps} if self.is_dynamic else {}

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept; from the beginning if that was not fp16."""
        if self.is_dynamic and meta:
            self.value, self._good_steps = meta["value"], meta["good_steps"]
