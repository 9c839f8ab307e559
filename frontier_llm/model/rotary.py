"""Normalise queries and keys if the model does, and rotate them by their positions.

`HeadNorms` normalises each head (Qwen 3, arXiv:2505.09388, section 2). `WidthNorms` normalises all
heads together (OLMo 2, arXiv:2501.00656), so that attention scores stay bounded. Both are RMSNorm:

    y = weight * x / sqrt(mean(x^2) + epsilon)

Zero-centred norms have the factor 1 + weight instead, added and multiplied in fp32, so that small
weights are not rounded in 16 bits.

In shapes, s is the number of tokens, b of samples, h of query heads and g of key heads of this
tensor-parallel rank, and d the width of a head.

The rotation is one function that can be compiled by itself. Rotary positions: Su et al., RoFormer
(arXiv:2104.09864, section 3.2.2), with the pairs of GPT-NeoX: element i of a head is rotated with
element i + r / 2, where r elements of a head are rotated.

megatron's function gives the same numbers, but it copies queries and keys once more, and computes
the cosines and sines for both.

For samples longer than those of earlier training the wavelengths can be stretched. A dimension pair
turns by its frequency per token. Pairs that make many turns within a sample of the earlier training
keep their frequency, and pairs that make few turns are slowed down by a factor, so that longer
samples contain no angles that the model has not seen. Between the two, the frequencies are
interpolated:

- `linear` slows all pairs down by the factor (Chen et al., arXiv:2306.15595, section 2.3).
- `llama3` interpolates linearly in the number of turns (Llama 3.1, in the code of the released
  model; Llama 3, arXiv:2407.21783, gives the base only).
- `yarn` interpolates linearly in the number of the pair, between the pairs with these numbers of
  turns, as the authors' code does. (The paper writes a ramp in the number of turns: YaRN,
  arXiv:2309.00071, section 3.2.) It also multiplies queries and keys by an attention factor
  (section 3.4).
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels


class RmsWeight(nn.Module):
    """The weight of a norm, which has a module of its own so that its name ends with `weight`."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.get_default_device()
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype, device=device))


def rms_norm(
    kernels: Kernels, x: Tensor, weight: Tensor, epsilon: float, *, centred: bool
) -> Tensor:
    """Normalise the last dim of a tensor; the result has its dtype."""
    if not centred:
        return kernels.rms_norm(x, weight, epsilon)
    (normalised,) = _WidthNorms.apply(epsilon, None, x, 1 + weight.float())
    return normalised


class HeadNorms(nn.Module):
    """Norms over the d elements of each head, with weights that all heads share.

    Each tensor-parallel rank sees only its own heads. The attribute `sequence_parallel` of the
    weights requests that their gradients are summed over these ranks.
    """

    def __init__(self, config: TransformerConfig, width: int, kernels: Kernels) -> None:
        super().__init__()
        self._centred = config.layernorm_zero_centered_gamma
        self.kernels, self.epsilon = kernels, config.layernorm_epsilon
        self.query, self.key = RmsWeight(width, config), RmsWeight(width, config)
        for parameter in self.parameters():
            is_shared = config.tensor_model_parallel_size > 1
            parameter.sequence_parallel = is_shared  # type: ignore[attr-defined]

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries [s, b, h, d] and keys [s, b, g, d]."""
        # both are parts of one tensor; TransformerEngine's norm wants inputs of their own
        norm = partial(rms_norm, self.kernels, epsilon=self.epsilon, centred=self._centred)
        return (
            norm(query.contiguous(), weight=self.query.weight),
            norm(key.contiguous(), weight=self.key.weight),
        )


class WidthNorms(nn.Module):
    """Norms over the widths h * d and g * d of all heads of a token on all tensor ranks."""

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
            outputs = _WidthNorms.apply(self.epsilon, self.group, *flat, *weights)
        normalised_query, normalised_key = outputs
        return normalised_query.view(query.shape), normalised_key.view(key.shape)


class _WidthNorms(torch.autograd.Function):
    """Norms whose sums over a token are summed over the ranks of a group, in one all-reduce.

    Without a group each rank has the whole width. Only inputs in their own dtype are stored.
    """

    @staticmethod
    def forward(
        ctx: Any, epsilon: float, group: dist.ProcessGroup | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Normalise the first half of the tensors, [..., width], by the weights that follow them.

        The results have the dtypes of the inputs.
        """
        inputs, weights = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        means = torch.stack([x.float().square().sum(-1) / _width(x, group) for x in inputs])
        if group is not None:
            dist.all_reduce(means, group=group)
        inverses = means.add_(epsilon).rsqrt_()
        ctx.save_for_backward(*tensors, inverses)
        ctx.group = group
        return tuple(
            (weight.float() * (x.float() * inverse[..., None])).to(x.dtype)
            for x, weight, inverse in zip(inputs, weights, inverses, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs and of the weights.

        With r = 1 / root mean square and g = weight * gradient of the output, the gradient of x is
        r * (g - x * r^2 * mean(g * x)), where the mean is over all ranks.
        """
        *tensors, inverses = ctx.saved_tensors
        inputs, weights = tensors[: len(grads)], tensors[len(grads) :]
        means = torch.stack(
            [
                (grad.float() * weight.float() * x.float()).sum(-1) / _width(x, ctx.group)
                for grad, weight, x in zip(grads, weights, inputs, strict=True)
            ]
        )
        if ctx.group is not None:
            dist.all_reduce(means, group=ctx.group)
        grad_inputs, grad_weights = [], []
        parts = zip(grads, inputs, weights, means, inverses[..., None], strict=True)
        for grad, x, weight, mean, inverse in parts:
            scaled, grad_fp32 = x.float() * inverse, grad.float()
            grad_weights.append((grad_fp32 * scaled).flatten(0, -2).sum(0).to(weight.dtype))
            inner = weight.float() * grad_fp32 - scaled * (inverse * mean[..., None])
            grad_inputs.append((inner * inverse).to(x.dtype))
        return None, None, *grad_inputs, *grad_weights


def _width(x: Tensor, group: dist.ProcessGroup | None) -> int:
    return x.shape[-1] * (1 if group is None else group.size())


def stretched(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """Return the frequencies of a model with `rotary_scaling`.

    They are [r / 2] fp32, in radians per token of each pair of the r rotated dimensions, in falling
    order.
    """
    if model.rotary_scaling == "none":
        return frequencies
    if model.rotary_scaling == "linear":
        return frequencies / model.rotary_factor
    shares = {"llama3": _llama3_share, "yarn": _yarn_share}
    share = shares[model.rotary_scaling](frequencies, model, model.rotary_original_length or 1)
    return frequencies * share + frequencies / model.rotary_factor * (1 - share)


def attention_factor(model: ModelConfig) -> float:
    """Return the factor of rotated queries and of rotated keys (YaRN, equation 22)."""
    if model.rotary_scaling != "yarn":
        return 1.0
    if model.rotary_attention_factor is not None:
        return model.rotary_attention_factor
    return 0.1 * math.log(model.rotary_factor) + 1.0


def _llama3_share(frequencies: Tensor, model: ModelConfig, length: int) -> Tensor:
    """Return the share of the original frequency in each stretched one: [r / 2], 0 to 1."""
    turns = length * frequencies / (2 * math.pi)
    slow, fast = model.rotary_slow_turns, model.rotary_fast_turns
    return ((turns - slow) / (fast - slow)).clamp(0, 1)


def _yarn_share(frequencies: Tensor, model: ModelConfig, length: int) -> Tensor:
    """Return the share of the original frequency in each stretched one: [r / 2], 0 to 1."""
    width = model.rotated_width

    def pair_with(turns: float) -> float:
        """Return the number of the pair that makes this many turns, in general a fraction."""
        wavelength = length / (2 * math.pi * turns)
        return width * math.log(wavelength) / (2 * math.log(model.rotary_base))

    first = max(math.floor(pair_with(model.rotary_fast_turns)), 0)
    last = min(math.ceil(pair_with(model.rotary_slow_turns)), width - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    # the authors' code avoids the division by zero in this way
    ramp = (pairs - first) / (last - first if last != first else 0.001)
    return 1 - ramp.clamp(0, 1)


def frequencies(model: ModelConfig, window: int | None) -> Tensor:
    """Return [r / 2] fp32, the radians per token of each pair of the r rotated dimensions.

    They are those of a layer with this window, or without one.
    """
    width = model.rotated_width
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    if window is not None and model.rotary_local_base is not None:
        return 1.0 / model.rotary_local_base**exponents
    return stretched(1.0 / model.rotary_base**exponents, model)


def angles(frequencies: Tensor, tokens: int) -> Tensor:
    """Return the angles of positions, [tokens, 1, 1, r] fp32, for `rotate`."""
    at = torch.arange(tokens, dtype=torch.float32, device=frequencies.device)
    half = torch.outer(at, frequencies)
    return torch.cat((half, half), dim=-1)[:, None, None, :]


def rotate(
    query: Tensor, key: Tensor, angles: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Rotate the first r elements of each head of queries [s, b, h, d] and keys [s, b, g, d].

    The angles are [s, b or 1, 1, r] fp32, where r <= d; the second half of them repeats the first.
    The rotated elements are multiplied by `factor`.
    """
    cosines, sines = angles.cos(), angles.sin()
    if factor != 1.0:
        cosines, sines = cosines * factor, sines * factor
    cosines, sines = cosines.to(query.dtype), sines.to(query.dtype)
    return _rotate(query, cosines, sines), _rotate(key, cosines, sines)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    width = cosines.shape[-1]
    rotated, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cosines + torch.cat((-second, first), dim=-1) * sines
    return rotated if rest is None else torch.cat((rotated, rest), dim=-1)


@cache
def compiled_rotate() -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Return `rotate` compiled by torch.compile, once per process for all layers."""
    return torch.compile(rotate)
