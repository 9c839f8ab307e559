"""The update rule and its schedule."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class OptimizerConfig(Section):
    """AdamW with linear warm-up and cosine decay; biases and norms are not decayed."""

    name: Literal["adamw"]
    """The update rule."""
    learning_rate: float = Field(gt=0)
    """Peak, reached at the end of the warm-up."""
    minimum_learning_rate: float = Field(ge=0)
    """Where the cosine ends."""
    warmup_steps: int = Field(ge=0)
    """Steps over which the rate grows linearly from 0."""
    decay_steps: int | None = Field(ge=1)
    """Step at which the minimum is reached; null = trainer.steps."""
    beta1: float = Field(ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(ge=0)
    """Decoupled weight decay."""
    clip_norm: float | None = Field(gt=0)
    """Gradients are scaled down to this global norm; null = never."""
