"""An encoder-decoder of any variant, written out: what ours is compared with. Needs torch alone.

The weights have our names. All scores are stored.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.model import plain_t5

Weights = dict[str, Tensor]


def logits(weights: Weights, model: Any, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Run a model of [b, s] tokens of the encoder, with a mask, and [b, t] of the decoder."""
    memory = weights["embedding.tokens.weight"][inputs]
    for layer in range(model.encoder_layers):
        read = _near(model, layer, inputs.shape[1]) & mask[:, None, None]
        memory = _layer(weights, model, layer, memory, read)
    memory = _norm(model, weights, "encoder_norm", memory)
    x, length = weights["embedding.tokens.weight"][targets], targets.shape[1]
    for layer in range(model.encoder_layers, model.layers):
        read = _near(model, layer, length).tril()
        x = _layer(weights, model, layer, x, read, memory, mask[:, None, None])
    x = _norm(model, weights, "final_norm", x)
    if model.tied:
        out = x @ weights["embedding.tokens.weight"].T / math.sqrt(model.hidden)
    else:
        out = x @ weights["head.weight"].T
    return _capped(out, model.logit_softcap)


def _near(model: Any, layer: int, tokens: int) -> Tensor:
    """Return which keys are in the window of which queries, on both sides."""
    at = torch.arange(tokens)
    has_window = model.window is not None and (
        model.window_every == 1 or (layer + 1) % model.window_every != 0
    )
    return (at[:, None] - at).abs() < (model.window if has_window else tokens)


def _layer(
    weights: Weights,
    model: Any,
    layer: int,
    x: Tensor,
    read: Tensor,
    memory: Tensor | None = None,
    memory_read: Tensor | None = None,
) -> Tensor:
    name, first = f"layers.{layer}", x
    parts: list[tuple[str, Any]] = [
        ("attention", partial(_attention, weights, model, layer, read)),
        ("ffn", partial(_feed_forward, weights, model, f"{name}.ffn")),
    ]
    if memory is not None and memory_read is not None:
        cross = partial(_cross_attention, weights, model, layer, memory, memory_read)
        parts.insert(1, ("cross_attention", cross))
    for part, branch in parts:
        source = first if model.residual == "parallel" else x
        if model.norm_placement == "output":
            x = x + _norm(model, weights, f"{name}.{part}_norm", branch(source))
        else:
            x = x + branch(_norm(model, weights, f"{name}.{part}_norm", source))
    return x


def _attention(weights: Weights, model: Any, layer: int, read: Tensor, x: Tensor) -> Tensor:
    name, d = f"layers.{layer}.attention", model.head_dim
    fused = _linear(weights, f"{name}.qkv", x).unflatten(2, (model.kv_heads, -1, d))
    query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    if model.qk_norm == "width":
        query = _rms(model, weights[f"{name}.query_norm.weight"], query.flatten(2)).view_as(query)
        key = _rms(model, weights[f"{name}.key_norm.weight"], key.flatten(2)).view_as(key)
    elif model.qk_norm == "head":
        query = _rms(model, weights[f"{name}.query_norm.weight"], query)
        key = _rms(model, weights[f"{name}.key_norm.weight"], key)
    bias = torch.zeros(())
    if model.positions == "rotary":
        query, key = _rotate(query, model.rotary_base), _rotate(key, model.rotary_base)
    else:
        bias = _bias(weights, model, layer, x.shape[1])
    return _linear(weights, f"{name}.output", _mix(model, query, key, value, read, bias))


def _cross_attention(
    weights: Weights, model: Any, layer: int, memory: Tensor, read: Tensor, x: Tensor
) -> Tensor:
    name, d = f"layers.{layer}.cross_attention", model.head_dim
    query = _linear(weights, f"{name}.query", x).unflatten(2, (model.heads, d))
    fused = _linear(weights, f"{name}.key_value", memory).unflatten(2, (model.kv_heads, 2, d))
    mixed = _mix(model, query, fused[..., 0, :], fused[..., 1, :], read, torch.zeros(()))
    return _linear(weights, f"{name}.output", mixed)


def _mix(
    model: Any, query: Tensor, key: Tensor, value: Tensor, read: Tensor, bias: Tensor
) -> Tensor:
    repeat = model.heads // model.kv_heads
    key, value = key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)
    scale = 1 / math.sqrt(model.head_dim) if model.scaled_attention else 1.0
    scores = torch.einsum("bshd,bthd->bhst", query, key) * scale
    scores = _capped(scores, model.attention_softcap) + bias
    # the queries of padding may read nothing: nobody reads what comes out of them
    weights = scores.masked_fill(~read, -1e9).softmax(-1)
    return torch.einsum("bhst,bthd->bshd", weights, value).flatten(2)


def _bias(weights: Weights, model: Any, layer: int, tokens: int) -> Tensor:
    side = "encoder" if layer < model.encoder_layers else "decoder"
    sizes = model.relative_buckets, model.relative_distance
    index = torch.tensor(
        [
            [plain_t5.bucket(k - q, *sizes, both_sides=side == "encoder") for k in range(tokens)]
            for q in range(tokens)
        ]
    )
    return weights[f"{side}_positions.weight"][index].permute(2, 0, 1)


def _rotate(x: Tensor, base: int) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * base ** -(torch.arange(half) / half)
    turn = torch.polar(torch.ones(()), angles)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def _feed_forward(weights: Weights, model: Any, name: str, x: Tensor) -> Tensor:
    act = {"geglu": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
           "swiglu": torch.nn.functional.silu}[model.activation]  # fmt: skip
    inner = act(_linear(weights, f"{name}.gate", x)) * _linear(weights, f"{name}.up", x)
    return _linear(weights, f"{name}.down", inner)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out, bias = x @ weights[f"{name}.weight"].T, weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def _norm(model: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    return _rms(model, weights[f"{name}.weight"], x)


def _rms(model: Any, weight: Tensor, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.norm_epsilon) * weight


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
