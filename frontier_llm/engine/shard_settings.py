"""What `shard` can be told: number formats of messages, dtypes of the computation, the update."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, SupportsFloat

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from frontier_llm.engine.hooks import Hook
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.formats import Feedback, Format, LevelFormats, StateFormats

Name = Literal["fp32", "bf16", "int8", "int4"]
Group = Literal["embedding", "matrices", "head", "norms"]
"""A kind of parameters: the weights of `nn.Embedding`, other tensors of two or more dimensions, and
tensors of one dimension (norms and biases). `shard` makes no group `head`."""


def number_of(learning_rate: object) -> float:
    """Return a learning rate as a number; refuse text, which `1e-3` is in a file of YAML."""
    found = float(learning_rate) if isinstance(learning_rate, SupportsFloat) else math.nan
    if not 0 <= found < math.inf:
        wants = "a number from 0 on"
        todo = "pass a number such as 1e-3; convert text by float(), and write 1.0e-3 in YAML"
        raise ConfigError("learning rate", repr(learning_rate), wants, todo)
    return found


@dataclass(frozen=True)
class Formats:
    """The number formats of gathered parameters, updated parameters, gradients and their sums.

    Parameters are never sent in more bits than they have. Integers have one scale per block.
    """

    params: Name = "fp32"
    """Of parameters that are gathered for a forward or backward pass."""
    refresh: Name = "fp32"
    """Of updated parameters, which are sent once per step."""
    grads: Name = "fp32"
    """Of gradients that are sent inside a node."""
    grads_across: Name | None = None
    """Of gradients that are sent between nodes; None = `grads`."""
    sums: Name = "fp32"
    """Of gradients that are summed over replicas."""
    block_elements: int = 256
    """Elements that share a scale."""
    keep_errors: bool = False
    """Whether the rounding error of a gradient that is sent between nodes is added to the next
    one."""

    PLAIN: ClassVar["Formats"]
    """No compression."""
    BF16: ClassVar["Formats"]
    """Gradients and their sums in bf16."""
    ZEROPP: ClassVar["Formats"]
    """Parameters in int8, gradients in int8 inside a node and in int4 between nodes (ZeRO++,
    arXiv:2306.10209)."""

    def at_each_step(self) -> StateFormats:
        """Return the formats of all collectives, which are those of every step."""

        def make(name: Name) -> Format:
            return Format(name, self.block_elements, 2)

        grads, across = make(self.grads), make(self.grads_across or self.grads)
        sums = make(self.sums)
        return StateFormats(
            params=make(self.params),
            params_backward=make(self.params),
            refresh=make(self.refresh),
            grads=LevelFormats(grads, grads, across),
            sums=LevelFormats(sums, sums, sums),
        )

    def feedback(self) -> Feedback | None:
        """Return how rounding errors are kept; None = they are not."""
        return Feedback() if self.keep_errors else None


Formats.PLAIN = Formats()
Formats.BF16 = Formats(grads="bf16", sums="bf16")
Formats.ZEROPP = Formats(params="int8", refresh="int8", grads="int8", grads_across="int4")


@dataclass(frozen=True)
class Precision:
    """Compute in another dtype than that of the master weights, which keep the module's dtype fp32.

    The fields have the meaning of FSDP2's `MixedPrecisionPolicy`.
    """

    param_dtype: torch.dtype
    """Dtype of the parameters in forward and backward passes."""
    output_dtype: torch.dtype | None = None
    """Dtype to which floating-point outputs of the module are converted; None = they are not."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of the module are converted to `param_dtype`."""

    def convert(self, module: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
        """Convert the parameters, whose values before are returned, and inputs and outputs."""
        values = {}
        for parameter in module.parameters():
            values[parameter] = parameter.data
            parameter.data = parameter.data.to(self.param_dtype)
        if self.cast_forward_inputs:
            module.register_forward_pre_hook(Hook(self._inputs), with_kwargs=True)
        if self.output_dtype is not None:
            module.register_forward_hook(Hook(self._outputs))
        return values

    def _inputs(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        return _cast(args, self.param_dtype), _cast(kwargs, self.param_dtype)

    def _outputs(self, _: nn.Module, __: Any, output: Any) -> Any:
        assert self.output_dtype is not None
        return _cast(output, self.output_dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
    )


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
    weight_decay: float | None = None
    """The learning rate and `rate_factor` multiply it; None = that of the update."""


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv:1711.05101) with a limit on the norm of the gradient."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    """Small number that is added to the square root of the second moment."""
    weight_decay: float = 0.1
    decayed: tuple[Group, ...] = ("embedding", "matrices")
    """Groups of parameters that have weight decay."""
    rate_factors: RateFactors = RateFactors()
    clip_norm: float | None = 1.0
    """Gradients with a larger norm are scaled down to it; None = no limit."""
    groups: Sequence[ParameterGroup] = ()
    name: Literal["adamw"] = "adamw"
    momentum: None = None
    """Not used by AdamW."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                "clip_norm", self.clip_norm, "a positive number", "use None for no limit"
            )
