"""The optimizer and its learning-rate schedule."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class OptimizerConfig(Section):
    """AdamW with linear warm-up and cosine decay; biases and norms have no weight decay."""

    name: Literal["adamw"]
    """The optimizer."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate, reached at the end of the warm-up."""
    minimum_learning_rate: float = Field(ge=0)
    """Learning rate at the end of the cosine decay."""
    warmup_steps: int = Field(ge=0)
    """Steps in which the learning rate grows linearly from 0."""
    decay_steps: int | None = Field(ge=1)
    """Step at which the learning rate reaches its minimum; null = trainer.steps."""
    beta1: float = Field(ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: float = Field(ge=0, lt=1)
    """Decay rate of the second moment."""
    epsilon: float = Field(gt=0)
    """Small number that is added to the square root of the second moment."""
    weight_decay: float = Field(ge=0)
    """Coefficient of decoupled weight decay."""
    clip_norm: float | None = Field(gt=0)
    """Limit of the global gradient norm. Larger gradients are scaled down to it; null = no
    limit."""
