"""In which number format the model computes."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class PrecisionConfig(Section):
    """Compute format; master weights, moments and accumulated gradients are always fp32."""

    name: Literal["fp32", "bf16", "fp16", "auto"]
    """`auto` is the faster of bf16 and fp32, by a quick measurement on the device."""
    initial_loss_scale: float = Field(gt=0)
    """fp16 only: the loss is multiplied by this before the backward pass."""
    minimum_loss_scale: float = Field(gt=0)
    """fp16 only: the run stops when the scale would have to fall below this."""
    growth_steps: int = Field(ge=1)
    """fp16 only: the scale doubles after so many steps without an overflow."""
