"""LayerNorm and RMSNorm in megatron's slot, on any device and under sequence parallel."""

from typing import Any

import torch
from torch import Tensor, nn

from frontier_llm.device.kernels import Kernels


class Norm(nn.Module):
    """A norm over the last dim, whose parameters say that their gradients are partial.

    Under sequence parallel each tensor rank normalises only its tokens, so the gradient of weight
    and bias is a sum over tensor ranks that somebody must add up: `sequence_parallel` marks it.
    """

    def __init__(
        self, config: Any, hidden_size: int, kernels: Kernels, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.kernels, self.eps = kernels, eps
        options = {"dtype": config.params_dtype, "device": torch.get_default_device()}
        self.weight = nn.Parameter(torch.ones(hidden_size, **options))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, **options))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden]; the result has the dtype of the input."""
        if self.bias is None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
