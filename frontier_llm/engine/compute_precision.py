"""The dtypes in which a module computes, if they are not those of its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from frontier_llm.engine.hooks import Hook


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
        """Convert the parameters, and let the module convert its inputs and outputs.

        Returns:
            The values of the parameters before.
        """
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
