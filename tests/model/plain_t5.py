"""mT5 as a torch user writes it: what ours is compared with. Needs torch alone.

Functions of a dictionary of weights, which has the names that transformers gives them.
"""

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]
EPSILON = 1e-6


def logits(
    weights: Weights,
    heads: int,
    encoder_tokens: Tensor,
    decoder_tokens: Tensor,
    encoder_mask: Tensor | None = None,
    distance: int = 128,
) -> Tensor:
    """Run the model.

    Args:
        weights: by name.
        heads: of each attention.
        encoder_tokens: [b, s] int64.
        decoder_tokens: [b, t] int64.
        encoder_mask: [b, s] bool, true where a token is; None = everywhere.
        distance: from which on all relative positions are one.

    Returns:
        [b, t, vocabulary].
    """
    hidden_of = torch.zeros((), device=encoder_tokens.device)
    if encoder_mask is not None:
        hidden_of = hidden_of.expand(encoder_mask.shape).masked_fill(~encoder_mask, -math.inf)
        hidden_of = hidden_of[:, None, None, :]
    places = torch.arange(decoder_tokens.shape[1], device=decoder_tokens.device)
    causal = torch.zeros(len(places), len(places), device=places.device)
    causal = causal.masked_fill(places[None, :] > places[:, None], -math.inf)

    x = weights["shared.weight"][encoder_tokens]
    bias = _bias(weights, "encoder", x.shape[1], distance) + hidden_of
    for block in range(_blocks(weights, "encoder")):
        name = f"encoder.block.{block}.layer"
        x = x + _attention(weights, f"{name}.0", "SelfAttention", heads, x, None, bias)
        x = x + _feed_forward(weights, f"{name}.1", x)
    memory = _norm(weights["encoder.final_layer_norm.weight"], x)

    x = weights["shared.weight"][decoder_tokens]
    bias = _bias(weights, "decoder", x.shape[1], distance) + causal
    for block in range(_blocks(weights, "decoder")):
        name = f"decoder.block.{block}.layer"
        x = x + _attention(weights, f"{name}.0", "SelfAttention", heads, x, None, bias)
        x = x + _attention(weights, f"{name}.1", "EncDecAttention", heads, x, memory, hidden_of)
        x = x + _feed_forward(weights, f"{name}.2", x)
    return _norm(weights["decoder.final_layer_norm.weight"], x) @ weights["lm_head.weight"].T


def bucket(place: int, buckets: int, distance: int, *, both_sides: bool) -> int:
    """Return the bucket of a key that lies `place` tokens behind the query."""
    first, away = 0, max(0, -place)
    if both_sides:
        buckets //= 2
        first, away = (buckets if place > 0 else 0), abs(place)
    single = buckets // 2
    if away < single:
        return first + away
    growth = math.log(away / single) / math.log(distance / single) * (buckets - single)
    return first + min(buckets - 1, single + int(growth))


def _bias(weights: Weights, side: str, length: int, distance: int) -> Tensor:
    """Return [1, heads, length, length]."""
    table = weights[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    both = side == "encoder"
    index = torch.tensor(
        [
            [bucket(key - query, len(table), distance, both_sides=both) for key in range(length)]
            for query in range(length)
        ]
    )
    return table[index].permute(2, 0, 1)[None]


def _attention(
    weights: Weights,
    layer: str,
    kind: str,
    heads: int,
    x: Tensor,
    memory: Tensor | None,
    bias: Tensor,
) -> Tensor:
    """Attend to oneself, or to the encoder's output; scores are not scaled."""
    normed = _norm(weights[f"{layer}.layer_norm.weight"], x)
    read = normed if memory is None else memory
    q, k, v = (
        (source @ weights[f"{layer}.{kind}.{name}.weight"].T).unflatten(-1, (heads, -1))
        for name, source in (("q", normed), ("k", read), ("v", read))
    )
    scores = torch.einsum("bshd,bthd->bhst", q, k) + bias
    mixed = torch.einsum("bhst,bthd->bshd", scores.softmax(dim=-1), v).flatten(2)
    return mixed @ weights[f"{layer}.{kind}.o.weight"].T


def _feed_forward(weights: Weights, layer: str, x: Tensor) -> Tensor:
    x = _norm(weights[f"{layer}.layer_norm.weight"], x)
    gate, up, down = (
        weights[f"{layer}.DenseReluDense.{name}.weight"].T for name in ("wi_0", "wi_1", "wo")
    )
    return (torch.nn.functional.gelu(x @ gate, approximate="tanh") * (x @ up)) @ down


def _norm(weight: Tensor, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPSILON) * weight


def _blocks(weights: Weights, side: str) -> int:
    return len({name.split(".")[2] for name in weights if name.startswith(f"{side}.block.")})
