"""Normalise queries and keys before they are rotated, so that attention scores stay bounded.

`HeadNorms` normalises each head (Qwen 3, arXiv:2505.09388, section 2). `WidthNorms` normalises all
heads together (OLMo 2, arXiv:2501.00656). Both are RMSNorm:

    y = weight * x / sqrt(mean(x^2) + epsilon)

In shapes, s is the number of tokens, b of samples, h of query heads and g of key heads of this
tensor-parallel rank, and d the width of a head.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from frontier_llm.device.kernels import Kernels


class RmsWeight(nn.Module):
    """The weight of a norm, which has a module of its own so that its name ends with `weight`."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.get_default_device()
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype, device=device))


class HeadNorms(nn.Module):
    """Norms over the d elements of each head, with weights that all heads share.

    Each tensor-parallel rank sees only its own heads, so the gradients of the weights must be
    summed over these ranks. Their attribute `sequence_parallel` requests this.
    """

    def __init__(self, config: TransformerConfig, width: int, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.epsilon = kernels, config.layernorm_epsilon
        self.query, self.key = RmsWeight(width, config), RmsWeight(width, config)
        for parameter in self.parameters():
            is_shared = config.tensor_model_parallel_size > 1
            parameter.sequence_parallel = is_shared  # type: ignore[attr-defined]

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries [s, b, h, d] and keys [s, b, g, d]."""
        # both are parts of one tensor; TransformerEngine's norm wants inputs of their own
        norm = self.kernels.rms_norm
        return (
            norm(query.contiguous(), self.query.weight, self.epsilon),
            norm(key.contiguous(), self.key.weight, self.epsilon),
        )


class WidthNorms(nn.Module):
    """Norms over all heads of a token, also those of other tensor-parallel ranks.

    The widths are h * d and g * d.
    """

    def __init__(
        self,
        config: TransformerConfig,
        widths: tuple[int, int],
        kernels: Kernels,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.kernels, self.epsilon, self.group = kernels, config.layernorm_epsilon, group
        self.query, self.key = (RmsWeight(width, config) for width in widths)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries [s, b, h, d] and keys [s, b, g, d]. Collective over the group."""
        flat = query.flatten(2).contiguous(), key.flatten(2).contiguous()
        weights = self.query.weight, self.key.weight
        if self.group.size() == 1:
            norm = self.kernels.rms_norm
            outputs = tuple(
                norm(x, weight, self.epsilon) for x, weight in zip(flat, weights, strict=True)
            )
        else:
            outputs = _WidthNorms.apply(*flat, *weights, self.epsilon, self.group)
        normalised_query, normalised_key = outputs
        return normalised_query.view(query.shape), normalised_key.view(key.shape)


class _WidthNorms(torch.autograd.Function):
    """Two norms whose sums over a token are summed over ranks, both in one all-reduce."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        epsilon: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        """Normalise [s, b, h * d] and [s, b, g * d]; the results have the dtypes of the inputs."""
        inputs, weights = (query, key), (query_weight, key_weight)
        means = torch.stack([x.float().square().sum(-1) / _width(x, group) for x in inputs])
        dist.all_reduce(means, group=group)
        inverses = means.add_(epsilon).rsqrt_()
        ctx.save_for_backward(*inputs, *weights, inverses)
        ctx.group = group
        first, second = (
            (weight.float() * (x.float() * inverse[..., None])).to(x.dtype)
            for x, weight, inverse in zip(inputs, weights, inverses, strict=True)
        )
        return first, second

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and both weights.

        With r = 1 / root mean square and g = weight * gradient of the output, the gradient of x is
        r * (g - x * r^2 * mean(g * x)), where the mean is over all ranks.
        """
        *tensors, inverses = ctx.saved_tensors
        inputs, weights = tensors[:2], tensors[2:]
        means = torch.stack(
            [
                (grad.float() * weight.float() * x.float()).sum(-1) / _width(x, ctx.group)
                for grad, weight, x in zip(grads, weights, inputs, strict=True)
            ]
        )
        dist.all_reduce(means, group=ctx.group)
        grad_inputs, grad_weights = [], []
        parts = zip(grads, inputs, weights, means, inverses[..., None], strict=True)
        for grad, x, weight, mean, inverse in parts:
            scaled, grad_fp32 = x.float() * inverse, grad.float()
            grad_weights.append((grad_fp32 * scaled).sum((0, 1)).to(weight.dtype))
            inner = weight.float() * grad_fp32 - scaled * (inverse * mean[..., None])
            grad_inputs.append((inner * inverse).to(x.dtype))
        return *grad_inputs, *grad_weights, None, None


def _width(x: Tensor, group: dist.ProcessGroup) -> int:
    return x.shape[-1] * group.size()
