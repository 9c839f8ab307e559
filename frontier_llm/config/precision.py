"""The section `precision`: the number format of the computation."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class PrecisionConfig(Section):
    """Compute format; master weights, moments and accumulated gradients are always fp32."""

    name: Literal["fp32", "bf16", "fp16", "auto"]
    """Compute format. `auto`: bf16 if the device has instructions for it, and fp32 otherwise."""
    initial_loss_scale: float = Field(gt=0)
    """fp16 only: initial loss scale, the factor of the loss in the backward pass."""
    minimum_loss_scale: float = Field(gt=0)
    """fp16 only: the run stops if the loss scale would fall below this number."""
    growth_steps: int = Field(ge=1)
    """fp16 only: steps without an overflow after which the loss scale doubles."""
