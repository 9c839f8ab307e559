"""The constants of the update."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from frontier_llm.errors import ConfigError

Group = Literal["embedding", "matrices", "head", "norms"]
"""A kind of parameters: the weights of `nn.Embedding`, other tensors of two or more dimensions, and
tensors of one dimension (norms and biases). `shard` makes no group `head`."""


@dataclass(frozen=True)
class RateFactors:
    """Factors of the learning rate, by group of parameters."""

    embedding: float = 1.0
    matrices: float = 1.0
    head: float = 1.0
    norms: float = 1.0


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate or weight decay of their own, as in `torch.optim`."""

    params: Iterable[nn.Parameter]
    rate_factor: float = 1.0
    """Factor of the learning rate."""
    weight_decay: float | None = None
    """Coefficient of weight decay, which the learning rate and `rate_factor` multiply; None = that
    of the update."""


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv:1711.05101) with a limit on the norm of the gradient."""

    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    epsilon: float = 1e-8
    """Small number that is added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Coefficient of decoupled weight decay."""
    decayed: tuple[Group, ...] = ("embedding", "matrices")
    """Groups of parameters that have weight decay."""
    rate_factors: RateFactors = RateFactors()
    """Factors of the learning rate, by group of parameters."""
    clip_norm: float | None = 1.0
    """Gradients with a larger norm are scaled down to it; None = no limit."""
    groups: Sequence[ParameterGroup] = ()
    """Parameters with a learning rate or weight decay of their own."""
    name: Literal["adamw"] = "adamw"
    """Name of the update; no other exists."""
    momentum: None = None
    """Not used by AdamW."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                "clip_norm", self.clip_norm, "a positive number", "use None for no limit"
            )
