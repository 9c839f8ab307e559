"""The optimizer and its learning-rate schedule."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section

Schedule = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
ENDING: tuple[Schedule, ...] = ("cosine", "linear", "wsd")
"""Schedules that reach their minimum at a given step."""
CooldownShape = Literal["linear", "1-sqrt"]
ParameterGroup = Literal["embedding", "matrices", "head", "norms"]
"""A kind of parameters. `embedding`: the tables of tokens (also if the head shares it) and of
positions; `matrices`: the matrices of the layers; `head`: a matrix that only the head has; `norms`:
norms and biases."""


class RateFactors(Section):
    """Factors of the learning rate, by group of parameters."""

    embedding: float = Field(default=1.0, ge=0)
    """Of the tables of tokens and positions. A table that the head shares is one of them."""
    matrices: float = Field(default=1.0, ge=0)
    """Of the matrices of the layers."""
    head: float = Field(default=1.0, ge=0)
    """Of the matrix of the head, if it is not shared with the embedding."""
    norms: float = Field(default=1.0, ge=0)
    """Of norms and biases."""


class OptimizerConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "adamw_8bit", "muon", "adafactor"]
    """The optimizer. `adamw_8bit`: AdamW with moments in 8 bits per element. `muon`: the matrices
    of the layers by Muon, all other parameters by AdamW. `adafactor`: the second moments of a
    matrix are sums over its rows and columns."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up. `cosine` and `linear`: it falls to its minimum; `constant`:
    it stays at its peak; `wsd`: it stays at its peak, then falls to its minimum in the cooldown;
    `inverse_sqrt`: it falls with the inverse square root of the step, down to its minimum."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate, reached at the end of the warm-up."""
    minimum_learning_rate: float = Field(ge=0)
    """Learning rate at the end of the schedule, or the limit to which `inverse_sqrt` falls. A
    constant learning rate does not use it."""
    warmup_steps: int = Field(ge=0)
    """Steps in which the learning rate grows linearly from 0."""
    decay_steps: int | None = Field(ge=1)
    """Step at which the learning rate reaches its minimum; null = trainer.steps. `constant` and
    `inverse_sqrt` do not end and need null."""
    cooldown_steps: int | None = Field(default=None, ge=1)
    """Length of the cooldown of `wsd` in steps; null = it follows from `cooldown_share`."""
    cooldown_share: float | None = Field(default=None, gt=0, le=1)
    """Length of the cooldown of `wsd` as a share of `decay_steps`; null = 0.2, unless
    `cooldown_steps` is set."""
    cooldown_shape: CooldownShape | None = None
    """Form of the cooldown of `wsd`: `linear`, or one minus the square root of the completed share
    (`1-sqrt`); null = `1-sqrt`."""
    timescale_steps: int | None = Field(default=None, ge=1)
    """Step from which on `inverse_sqrt` lets the learning rate fall; null = `warmup_steps`."""
    cross_attention_steps: int = Field(default=0, ge=0)
    """First steps of an encoder-decoder in which only cross-attention and its norms are updated, as
    suits a run that begins from a decoder (`run.init_from`). Only with AdamW; 0 = none."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Factor of Muon's momentum; null = 0.95. AdamW needs null."""
    beta1: float = Field(ge=0, lt=1)
    """Decay rate of the first moment; Adafactor keeps no first moment if it is 0."""
    beta2: float = Field(ge=0, lt=1)
    """Decay rate of the second moment; for Adafactor the limit to which it grows."""
    epsilon: float = Field(gt=0)
    """Small number that is added to the square root of the second moment. Adafactor does not use
    it."""
    weight_decay: float = Field(ge=0)
    """Coefficient of decoupled weight decay."""
    decayed: tuple[ParameterGroup, ...] = Field(("embedding", "matrices", "head"), strict=False)
    """Groups of parameters that have weight decay, such as `[matrices,head]`. `norms` are norms and
    biases."""
    rate_factors: RateFactors = Field(default_factory=RateFactors)
    """Factors of the learning rate, by group of parameters."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of z-loss, which keeps the logits small: the loss of a token gets the additional
    term z_loss * log(Z)^2, where Z is the divisor of its softmax. 0 = none; PaLM uses 1e-4."""
    clip_norm: float | None = Field(gt=0)
    """Limit of the global gradient norm. Larger gradients are scaled down to it; null = no
    limit."""
