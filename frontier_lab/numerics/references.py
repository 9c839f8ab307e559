"""The formulas of the kernels of a layer and of the loss, forward and backward, in fp64.

They are written from the papers and share no code with the kernels. Each returns the results of a
kernel by name, as numbers that know how far rounding may move the result of a kernel from them.
`a.run` is the unit roundoff of the format of the run, to which a kernel may round what it stores.

A kernel rounds the results of its operations. With unit roundoff u (2^-24 in fp32, 2^-11 in fp16,
2^-8 in bf16), a rounded number x differs from the exact one by at most u |x|. The model of this
module is that of Higham and Mary (SIAM J. Sci. Comput. 41, 2019, A2815): these errors are
independent, and their mean is 0. An error between -u |x| and u |x| then has a variance of about
(u x)^2 / 3, and a reference carries the variance of its error through its formula to first order:

    rounding            + (u x)^2 / 3
    function f(x)       f'(x)^2 var(x)
    product x y         y^2 var(x) + x^2 var(y)
    sum s of n products + n (u^2 / 3) (s^2 + sum (x y)^2): the partial sums of data with mean 0 are
                        a random walk, of about this size
    sum of n numbers    + n (u^2 / 3) (sum |x|)^2: the partial sums of positive numbers

The bound of an element is SIGMAS standard deviations. It therefore follows from the format, from
the number of additions and from the magnitudes of the reference. No part of it is measured.

The matrix units of GPUs may cut off sums in fp32 instead of rounding them (Fasi et al., Numerical
behavior of NVIDIA tensor cores, PeerJ Comput. Sci. 7, 2021, e330). These errors have the same sign.
For n products in steps of at least 8, each cut off by at most 2 u, they add up to n u / 4 of a
partial sum. A partial sum is at most three times its root mean square, and a sixth of the result
counts as one standard deviation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frontier_llm.config.model import ModelConfig

SIGMAS = 6.0
"""Standard deviations of an error that a correct kernel does not exceed. A normal error exceeds
them once in 5e8 numbers, and rounding errors are bounded."""
FP32 = 2.0**-24
"""Unit roundoff of fp32."""


@dataclass(frozen=True)
class Arithmetic:
    """The roundings of a device in the number format of a run."""

    dtype: torch.dtype
    truncates: bool = False
    """Whether sums of products may be cut off: on a GPU in 16 bits."""
    operands: float = 0.0
    """Unit roundoff to which the operands of products are rounded first (TF32), or 0."""
    adds_in_run: bool = False
    """Whether sums over tokens, of the gradients of norms, are kept in the format of the run, as
    torch's kernels for CPUs do in 16 bits."""
    splits: bool = False
    """Whether torch may add up parts of a product in the format of the run, its default on a GPU in
    16 bits (`allow_bf16_reduced_precision_reduction`)."""

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> "Arithmetic":
        """Return the roundings of a device, by torch's settings."""
        is_short, on_gpu = dtype != torch.float32, device.type != "cpu"
        has_tf32 = torch.get_float32_matmul_precision() != "highest"
        settings = torch.backends.cuda.matmul
        reduced = (
            settings.allow_bf16_reduced_precision_reduction,
            settings.allow_fp16_reduced_precision_reduction,
        )[dtype == torch.float16]
        return cls(
            dtype,
            truncates=is_short and on_gpu,
            operands=2.0**-11 if has_tf32 and not is_short and on_gpu else 0.0,
            adds_in_run=is_short and not on_gpu,
            splits=bool(reduced) and is_short and on_gpu,
        )

    @property
    def run(self) -> float:
        """Unit roundoff of the format of the run."""
        return unit_roundoff(self.dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance of 1 to the next number of a format."""
    return torch.finfo(dtype).eps / 2


class Number(NamedTuple):
    """A tensor of exact results, and of the variances of a kernel's errors."""

    value: Tensor
    """fp64, on the host."""
    variance: Tensor
    """fp64, in a shape that broadcasts to that of `value`."""

    @classmethod
    def exact(cls, tensor: Any) -> "Number":
        """Return numbers that a kernel gets as they are."""
        value = torch.as_tensor(tensor).detach().cpu().double()
        return cls(value, torch.zeros((), dtype=torch.float64))

    def round(self, unit: float = FP32, times: int = 1) -> "Number":
        """Return the numbers after one or several roundings.

        The numbers of fp16 below 2^-14 have the same distance, 2^-24.
        """
        floor = 2.0**-25 if unit == unit_roundoff(torch.float16) else 0.0
        errors = (unit * self.value).square() + floor**2
        return Number(self.value, self.variance + times * errors / 3)

    def apply(self, function: Callable[[Tensor], Tensor]) -> "Number":
        """Return an elementwise function of the numbers, exactly computed."""
        x = self.value.clone().requires_grad_()
        with torch.enable_grad():
            y = function(x)
            (slope,) = torch.autograd.grad(y.sum(), x)
        return Number(y.detach(), slope.square() * self.variance)

    def view(self, change: Callable[[Tensor], Tensor]) -> "Number":
        """Return the numbers in another order or shape."""
        return Number(change(self.value), change(self.variance.expand(self.value.shape)))

    def columns(self, first: int, stop: int | None) -> "Number":
        """Return a range of the last dim."""
        return self.view(lambda t: t[..., first:stop])

    def times(self, other: "Number | Tensor | float") -> "Number":
        """Return the products, exactly computed."""
        y = other if isinstance(other, Number) else Number.exact(other)
        variance = self.variance * y.value.square() + self.value.square() * y.variance
        return Number(self.value * y.value, variance)

    def plus(self, other: "Number | Tensor | float") -> "Number":
        """Return the sums, exactly computed."""
        y = other if isinstance(other, Number) else Number.exact(other)
        return Number(self.value + y.value, self.variance + y.variance)

    def minus(self, other: "Number | Tensor | float") -> "Number":
        """Return the differences, exactly computed."""
        y = other if isinstance(other, Number) else Number.exact(other)
        return self.plus(Number(-y.value, y.variance))

    def sum(self, dim: int, unit: float = FP32, *, random: bool = False) -> "Number":
        """Return the sums over a dim, which stays with one element.

        `unit` is the roundoff of partial sums. With `random` the numbers have mean 0.
        """
        count, x = self.value.shape[dim], self.value
        total, variance = x.sum(dim, True), self.variance.expand(x.shape).sum(dim, True)
        scale = x.abs().sum(dim, True).square()
        if random:
            scale = total.square() + x.square().sum(dim, True)
        return Number(total, variance + count * unit**2 / 3 * scale)

    def product(self, other: "Number", arithmetic: Arithmetic) -> "Number":
        """Return the matrix products, summed in fp32."""
        x, y = self, other
        total = x.value @ y.value
        squares = total.square() + x.value.square() @ y.value.square()
        count, variance = x.value.shape[-1], torch.zeros_like(squares)
        if x.variance.any():
            variance += x.variance.expand(x.value.shape) @ y.value.square()
        if y.variance.any():
            variance += x.value.square() @ y.variance.expand(y.value.shape)
        share = count * FP32**2 / 3 + 2 * arithmetic.operands**2 / 3
        if arithmetic.truncates:
            share += (count * FP32 / 4 * 3 / SIGMAS) ** 2
        if arithmetic.splits:  # into at most 16 parts, each rounded once
            share += 16 * arithmetic.run**2 / 3
        return Number(total, variance + share * squares)

    @property
    def bound(self) -> Tensor:
        """The largest error of a correct kernel, for each element."""
        return SIGMAS * self.variance.expand(self.value.shape).sqrt()


Results = dict[str, Number]
exact = Number.exact


def norm_factor(model: ModelConfig, weight: Tensor) -> Tensor:
    """Return the factor of a norm: 1 + weight in fp32 if norms are zero-centred."""
    return 1 + weight.float() if model.zero_centred_norms else weight


def norm(
    a: Arithmetic,
    x: Number,
    weights: tuple[Tensor, Tensor | None],
    epsilon: float,
    g: Number,
) -> Results:
    """RMSNorm of [n, width], or with a bias LayerNorm.

    x' = x - mean(x) (RMSNorm: x), r = 1 / sqrt(mean(x'^2) + epsilon), y = weight x' r + bias. With
    g = weight * gradient: dx = r (g - mean(g) - x' r mean(g x' r)), without mean(g) in RMSNorm.
    """
    weight, bias = weights
    width, w = weight.numel(), exact(weight)
    centred = x
    if bias is not None:
        centred = x.minus(x.sum(-1, random=True).times(1 / width).round()).round()
    squares = centred.times(centred.value).round(times=2)
    r = squares.sum(-1).times(1 / width).plus(epsilon).round(times=2).apply(torch.rsqrt).round()
    scaled = centred.times(r).round(a.run)
    y = scaled.times(w).round(a.run)
    y = y if bias is None else y.plus(exact(bias))
    scaled_grad = g.times(w).round(a.run)
    along = scaled_grad.times(scaled).round(a.run).sum(-1, random=True).times(1 / width)
    inner = scaled_grad.minus(scaled.times(along.round(a.run)).round(a.run)).round(a.run)
    if bias is not None:
        mean = scaled_grad.sum(-1, random=True).times(1 / width).round(a.run)
        inner = inner.minus(mean).round(a.run)
    results = {
        "output": y.round(a.run),
        "gradient of the input": inner.times(r).round(a.run, 2),
        "gradient of the weight": over_rows(g.times(scaled).round(a.run), a),
    }
    if bias is not None:
        results["gradient of the bias"] = over_rows(g, a)
    return results


def over_rows(x: Number, a: Arithmetic) -> Number:
    """Sum [n, width] over rows, in the format of the run."""
    unit = a.run if a.adds_in_run else FP32
    return x.sum(0, unit, random=True).round(a.run).view(lambda t: t[0])


def angles(model: ModelConfig, tokens: int) -> Number:
    """Return the rotary angles of each position in the first layer: [tokens, rotated width / 2].

    A pair i turns by base^(-2 i / r) per token. Stretched wavelengths: Llama 3.1's released code,
    and YaRN (arXiv:2309.00071) in the form of its authors' code.
    """
    r, window = model.rotated_width, model.layer_window(0)
    is_local = window is not None and model.rotary_local_base is not None
    base: Any = model.rotary_local_base if is_local else model.rotary_base
    exponents = exact(torch.arange(0, r, 2, dtype=torch.float64) / r).round(times=2)
    frequencies = exponents.apply(lambda e: torch.exp(-math.log(base) * e)).round(times=2)
    kept = None if is_local else _kept_share(frequencies.value, model)
    if kept is not None:
        # a share is computed in about 16 operations, near 1 and relative to `rotary_factor`
        frequencies = frequencies.times(kept + (1 - kept) / model.rotary_factor).round(times=256)
    return exact(torch.arange(tokens)[:, None]).times(frequencies).round()


def _kept_share(frequencies: Tensor, model: ModelConfig) -> Tensor | None:
    """Return the share of each frequency that is not stretched; None = no scaling."""
    r, length = model.rotated_width, model.rotary_original_length
    slow, fast = model.rotary_slow_turns, model.rotary_fast_turns
    if model.rotary_scaling == "linear":
        return torch.zeros_like(frequencies)
    if model.rotary_scaling == "none" or length is None:
        return None
    if model.rotary_scaling == "llama3":
        turns = frequencies * length / (2 * math.pi)
        return ((turns - slow) / (fast - slow)).clamp(0, 1)
    first, last = (
        r * math.log(length / (2 * math.pi * turns)) / (2 * math.log(model.rotary_base))
        for turns in (fast, slow)
    )
    low, high = max(math.floor(first), 0), min(math.ceil(last), r - 1)
    pairs = torch.arange(r // 2, dtype=torch.float64)
    return 1 - ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)


def rotation(model: ModelConfig, tokens: int, a: Arithmetic) -> tuple[Number, Number]:
    """Return the cosines and sines of the angles, times YaRN's factor, in the run's format."""
    factor = 1.0
    if model.rotary_scaling == "yarn":
        given = model.rotary_attention_factor
        factor = 0.1 * math.log(model.rotary_factor) + 1.0 if given is None else given
    turned = angles(model, tokens)
    both = (turned.apply(f).round(times=4).times(factor) for f in (torch.cos, torch.sin))
    cosines, sines = (x.round(a.run) for x in both)
    return cosines, sines


def rotate(x: Number, cosines: Number, sines: Number, a: Arithmetic) -> Number:
    """Rotate [s, b, h, d] by [s, r / 2] cosines and sines: element i with element i + r / 2."""
    half = cosines.value.shape[1]
    cos, sin = (t.view(lambda v: v[:, None, None]) for t in (cosines, sines))
    first, second = x.columns(0, half), x.columns(half, 2 * half)
    turned = (
        first.times(cos).round(a.run).minus(second.times(sin).round(a.run)).round(a.run),
        second.times(cos).round(a.run).plus(first.times(sin).round(a.run)).round(a.run),
        x.columns(2 * half, None),
    )
    return concatenated(turned, -1)


def concatenated(parts: Sequence[Number], dim: int) -> Number:
    """Concatenate numbers along a dim."""
    variances = [part.variance.expand(part.value.shape) for part in parts]
    return Number(torch.cat([part.value for part in parts], dim), torch.cat(variances, dim))


def score_scale(model: ModelConfig) -> float:
    """Return the factor of the scores; with muP it is sqrt(base width of a head) / width."""
    if model.mup_base_head_dim is not None:
        return math.sqrt(model.mup_base_head_dim) / model.head_dim
    if model.score_width is not None:
        return float(model.score_width**-0.5)
    return 1 / math.sqrt(model.head_dim) if model.scaled_attention else 1.0


def attention(
    a: Arithmetic,
    model: ModelConfig,
    tensors: Sequence[Tensor],
    is_read: Tensor,
    bias: Tensor | None,
    blocks: int,
) -> Results:
    """Attention of one head of keys and the query heads that read it.

    S = scale q k^T + bias, or c tanh(S / c) with a bound c; P = softmax(S) over the keys that are
    read; O = P v. dv = P^T dO, dS = P (dO v^T - rowsum(dO O)), dq = scale dS k, dk = scale dS^T q.

    The tensors are queries [n, d] of all heads, keys [t, d], values [t, d] and the gradient of the
    output [n, d]. Each query reads a key, [n, t]. torch's kernel for CPUs adds up `blocks` of
    queries separately.
    """
    scale, cap = score_scale(model), model.attention_softcap
    times = blocks * a.adds_in_run
    heads = model.heads // model.kv_heads
    times += 2 * heads if heads > 1 else 0  # a kernel may round the sums of each head
    q, k, v, g = map(exact, tensors)
    # only capped scores are stored in the format of the run; queries may be scaled first
    unit = FP32 if cap is None else a.run
    scores = q.product(k.view(lambda t: t.T), a).times(scale).round(unit, 2)
    scores = scores if bias is None else scores.plus(bias).round()
    powers = _powers(scores, is_read, cap)
    inverse = powers.sum(-1).apply(lambda t: 1 / t)
    output = powers.round(a.run).product(v, a).times(inverse).round(a.run)
    weights = powers.times(inverse).round()
    # the stored output is rounded, and its product with the gradient is summed
    delta = g.times(output).round().sum(-1, random=True)
    grad_scores = weights.times(g.product(v.view(lambda t: t.T), a).minus(delta.value))
    if cap is not None:
        slope = scores.apply(lambda t: 1 - torch.tanh(t / cap).square()).round(times=8)
        grad_scores = grad_scores.times(slope).round(a.run)
    grad_scores = grad_scores.round(times=2).round(a.run)
    # the error of delta is common to all scores of a query, so that it adds up over keys
    by_delta = weights.value.square() * delta.variance
    of_keys = Number(grad_scores.value, grad_scores.variance + by_delta)
    common = delta.variance * (weights.value @ k.value).square()
    grad_q = of_keys.product(k, a)
    # blocks of 512 keys are added up as `_over_queries` says
    blocks = -(-len(k.value) // 512) * a.adds_in_run
    squares = grad_q.value.square() + grad_scores.value.square() @ k.value.square()
    sums = blocks * a.run**2 / 3 * squares
    grad_q = Number(grad_q.value, grad_q.variance + common + sums).times(scale)
    return {
        "output": output,
        "gradient of the queries": grad_q.round(a.run, 2),
        "gradient of the keys": _over_queries(of_keys, q, times, a).times(scale).round(a.run),
        "gradient of the values": _over_queries(weights.round(a.run), g, times, a),
        "gradient of the scores": of_keys,
    }


def _powers(scores: Number, is_read: Tensor, cap: float | None) -> Number:
    """Return exp(score - largest score of the query), 0 where a key is not read."""
    if cap is not None:
        scores = scores.apply(lambda t: cap * torch.tanh(t / cap)).round(times=4)
    largest = scores.value.masked_fill(~is_read, -torch.inf).amax(-1, keepdim=True)
    return scores.minus(largest).round(times=2).apply(torch.exp).round(times=2).times(is_read)


def _over_queries(left: Number, right: Number, times: int, a: Arithmetic) -> Number:
    """Return left^T right of [n, t] and [n, d], with that many roundings of partial sums.

    torch's kernel for CPUs adds blocks of queries to gradients in the format of the run (torch
    2.9, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention_backward).
    """
    total = left.view(lambda t: t.T).product(right, a).round(a.run)
    squares = total.value.square() + left.value.square().T @ right.value.square()
    return Number(total.value, total.variance + times * a.run**2 / 3 * squares)


def linear(a: Arithmetic, x: Number, weight: Tensor, bias: Tensor | None) -> Number:
    """Return x w^T + bias of [n, in] and [out, in]."""
    y = x.product(exact(weight.T), a)
    return y.round(a.run) if bias is None else y.plus(exact(bias)).round(a.run, 2)


def activation(a: Arithmetic, name: str, inputs: Number, g: Number) -> Results:
    """GELU, or gated: f(first half) * second half, where f is SiLU or GELU.

    Sources: GELU, arXiv:1606.08415; gated units, arXiv:2002.05202. Both functions are x s(x), with
    a share s between 0 and 1, which is computed in fp32 in about 8 operations near 1. The slope
    s + x s' has factors of at most s (1 + |x|), of which 6 may be stored in the format of the run.
    """

    def f(t: Tensor) -> Tensor:
        if name == "swiglu":
            return t * torch.sigmoid(t)
        if name == "gelu_exact":
            return t * torch.special.ndtr(t)
        return t / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))

    is_gated = name in ("swiglu", "geglu")
    width = inputs.value.shape[-1] // (2 if is_gated else 1)
    first, second = inputs.columns(0, width), inputs.columns(width, None)
    x, activated = first.value, first.apply(f)
    activated = Number(activated.value, activated.variance + 8 * (FP32 * x).square() / 3)
    activated = activated.round(a.run)
    slope = first.apply(lambda t: torch.autograd.grad(f(t).sum(), t, create_graph=True)[0])
    share = f(x) / torch.where(x == 0, 1.0, x)
    errors = (a.run * share).square() * 6 + 8 * FP32**2
    slope = Number(slope.value, slope.variance + (1 + x.abs()).square() * errors / 3)
    if not is_gated:
        grad = g.times(slope).round(a.run, 2)
        return {"output": activated.round(a.run), "gradient of the input": grad}
    grads = g.times(second).round(a.run).times(slope), g.times(activated)
    return {
        "output": activated.times(second).round(a.run),
        "gradient of the input": concatenated(grads, -1).round(a.run, 2),
    }


def cross_entropy(
    a: Arithmetic,
    x: Number,
    labels: Tensor,
    cap: float | None,
    factors: Tensor,
    z_loss: float,
) -> Results:
    """Cross entropy and log Z of [n, v] logits, and the gradient of the logits.

    L = log Z - x_label, with Z = sum exp(x), and x = cap tanh(logit / cap) if there is a bound. The
    gradient of f (L + z log^2 Z) is f ((1 + 2 z log Z) softmax - [label]).
    """
    if cap is not None:
        x = x.apply(lambda t: cap * torch.tanh(t / cap)).round(times=4).round(a.run)
    largest = x.value.amax(-1, keepdim=True)
    powers = x.minus(largest).round().apply(torch.exp).round(times=2)
    divisor = powers.sum(-1)
    log_z = divisor.apply(torch.log).round(times=2).plus(largest).round()
    at_label = labels[:, None]
    losses = log_z.minus(x.view(lambda t: t.gather(1, at_label))).round()
    softmax = x.minus(log_z).round().apply(torch.exp).round(times=2)
    scale = exact(factors[:, None]).times(log_z.times(2 * z_loss).plus(1.0)).round(times=4)
    grad = softmax.times(scale).round()
    target = torch.zeros_like(grad.value).scatter_(1, at_label, factors[:, None].double())
    grad = grad.minus(target).round(times=2)
    if cap is not None:
        slope = x.apply(lambda t: 1 - (t / cap).square())
        grad = grad.times(Number(slope.value, slope.variance + 4 * FP32**2)).round()
    return {
        "cross entropy": losses.view(lambda t: t[:, 0]),
        "log of the divisor": log_z.view(lambda t: t[:, 0]),
        "gradient of the logits": grad.round(a.run),
    }
