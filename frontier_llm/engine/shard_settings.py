"""What `shard` can be told: number formats of messages, dtypes of the computation, the update."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar, Literal, SupportsFloat, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from frontier_llm.engine.hooks import Hook
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.formats import Feedback, Format, LevelFormats, StateFormats

Name = Literal["fp32", "bf16", "int8", "int4"]
Group = Literal["embedding", "matrices", "norms"]
"""A kind of parameters: the weights of `nn.Embedding`, other tensors of two or more dimensions, and
tensors of one dimension (norms and biases)."""
Fits = Callable[[Any], bool]
FACTOR: tuple[str, Fits] = "a number from 0 on", lambda n: 0 <= n < math.inf
POSITIVE: tuple[str, Fits] = "a positive number", lambda n: 0 < n < math.inf
COUNT: tuple[str, Fits] = "a whole number from 1 on", lambda n: n > 0 and isinstance(n, Integral)


def check_numbers(
    wants: str, fits: Fits, todo: str = "pass such a number", **numbers: object
) -> None:
    """Raise a ConfigError that names the first of the numbers that is none, or does not fit."""
    for key, got in numbers.items():
        if isinstance(got, bool) or not isinstance(got, SupportsFloat) or not fits(got):
            raise ConfigError(key, repr(got), wants, todo)


def number_of(learning_rate: Any) -> float:
    """Return a learning rate as a number; refuse text, which `1e-3` is in a file of YAML."""
    todo = "pass a number such as 1e-3; convert text by float(), and write 1.0e-3 in YAML"
    check_numbers(*FACTOR, todo, **{"learning rate": learning_rate})
    return float(learning_rate)


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

    def __post_init__(self) -> None:
        names = get_args(Name)
        for key in ("params", "refresh", "grads", "grads_across", "sums"):
            if (got := getattr(self, key)) not in names and (key, got) != ("grads_across", None):
                raise ConfigError(key, repr(got), ", ".join(names), "write one of them")
        sizes, wants = range(32, 8193, 32), "a multiple of 32 up to 8192"
        check_numbers(wants, sizes.__contains__, block_elements=self.block_elements)
        across = {self.grads_across or self.grads, self.sums}
        if self.keep_errors and across.isdisjoint(("int8", "int4")):
            todo = "set grads_across to int8 or int4, or leave keep_errors out"
            raise ConfigError("keep_errors", True, "integers between nodes to have errors of", todo)

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
    norms: float = 1.0


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate or weight decay of their own, as in `torch.optim`."""

    params: Iterable[nn.Parameter]
    rate_factor: float = 1.0
    weight_decay: float | None = None
    """The learning rate and `rate_factor` multiply it; None = that of the update."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", tuple(self.params))
        if not self.params:
            todo = "pass a list: a generator such as module.parameters() is empty after one use"
            raise ConfigError("params", "none", "parameters of the module", todo)
        decay = 0.0 if self.weight_decay is None else self.weight_decay
        check_numbers(*FACTOR, rate_factor=self.rate_factor, weight_decay=decay)


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
    name: Literal["adamw"] = field(default="adamw", init=False)
    momentum: None = field(default=None, init=False)
    """Not used by AdamW."""

    def __post_init__(self) -> None:
        limit = 1.0 if self.clip_norm is None else self.clip_norm
        check_numbers(*POSITIVE, "use None for no limit", clip_norm=limit)
        check_numbers(*POSITIVE, epsilon=self.epsilon)
        wants = "a number from 0 to below 1"
        check_numbers(wants, lambda n: 0 <= n < 1, beta1=self.beta1, beta2=self.beta2)
        check_numbers(*FACTOR, weight_decay=self.weight_decay, **vars(self.rate_factors))
        if isinstance(self.decayed, str) or not set(self.decayed) <= set(get_args(Group)):
            wants = f"some of {', '.join(get_args(Group))}"
            raise ConfigError("decayed", repr(self.decayed), wants, "pass a tuple of them")
        object.__setattr__(self, "groups", tuple(self.groups))
