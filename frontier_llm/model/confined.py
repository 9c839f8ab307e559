"""Compute causal attention that is confined to a window or to a document, or has capped scores.

A token reads the keys of its own document, and in a layer with a window of w tokens only itself and
the w - 1 tokens before it (Longformer, arXiv:2004.05150, section 3.1; Mistral 7B, arXiv:2310.06825,
section 2). A cap c bounds the scores before the softmax: c * tanh(score / c) (Gemma 2,
arXiv:2408.00118, section 2).

No matrix of all scores is stored. Each document is computed by itself. Windows and capped scores
are computed in blocks of queries, and each block is computed again in the backward pass. A block of
a window reads no keys before the window, so that the time is proportional to tokens * (w + block).
On a GPU, FlexAttention can compute the same (flex.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 128
"""Queries per block on a CPU."""
DEVICE_QUERY_BLOCK = 1024
"""Queries per block on a GPU, which smaller blocks would not keep busy."""


def query_block(device: torch.device) -> int:
    """Return the number of queries per block, if attention is computed in blocks."""
    return QUERY_BLOCK if device.type == "cpu" else DEVICE_QUERY_BLOCK


class Documents:
    """The documents of the samples of a micro-batch.

    The cumulative lengths are [b samples, k] int32, ascending: 0, then for each document of a
    sample the index of the token after its last one. The last document ends at `tokens`, which is
    repeated at the end of a row with fewer documents.
    """

    def __init__(self, cumulative_lengths: Tensor, tokens: int) -> None:
        self._borders, self._tokens = cumulative_lengths, tokens

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The lengths of the documents of each sample; on a GPU the host waits for them."""
        rows = self._borders.diff(dim=1).tolist()
        return [[length for length in row if length] for row in rows]

    @cached_property
    def ids(self) -> Tensor:
        """[b, tokens] int64, for each token the number of its document in the sample, from 1 on."""
        at = torch.arange(self._tokens, dtype=self._borders.dtype, device=self._borders.device)
        at = at.repeat(len(self._borders), 1)
        return torch.searchsorted(self._borders, at, right=True)


@dataclass(frozen=True)
class Scores:
    """How a layer computes its scores and weights."""

    scale: float | None = None
    """Factor of the scores; None = 1 / sqrt(d) for heads of width d."""
    window: int | None = None
    """Keys that a query reads at most, its own included; None = all before it."""
    cap: float | None = None
    """Bound of the scores; None = no bound."""
    dropout: float = 0.0
    """Probability with which a weight is dropped."""

    @property
    def is_confined(self) -> bool:
        """Whether torch's causal attention does not compute these scores."""
        return self.window is not None or self.cap is not None


@torch._disable_dynamo  # torch.compiler.disable would import the compiler here, in half a second
def confined_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, documents: Documents | None
) -> Tensor:
    """Compute causal attention: [b, h, s, d], with the dtype of the query.

    The query is [b samples, h heads, s tokens, d]; key and value are [b, g, s, d], where g divides
    h. Without documents a sample is one document.
    """
    if documents is None:
        return causal_attention(query, key, value, scores)
    samples = []
    for *sample, lengths in zip(query, key, value, documents.lengths, strict=True):
        # one `split` per tensor, whose gradient is one tensor; a slice would have a whole one
        q, k, v = (x[None].split(lengths, dim=2) for x in sample)
        parts = [causal_attention(*part, scores) for part in zip(q, k, v, strict=True)]
        samples.append(torch.cat(parts, dim=2))
    return torch.cat(samples)


def repeats_heads(device: torch.device, *, masked: bool) -> bool:
    """Return whether attention needs as many heads of keys and values as of queries.

    A CPU's kernel does. On a GPU, cuDNN's is the only one that takes a mask and fewer heads of
    keys, and torch prefers it from compute capability 9.0 (H100) on.
    """
    if device.type == "cpu":
        return True
    if not masked:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0)


def repeat_heads(
    query: Tensor, key: Tensor, value: Tensor, *, masked: bool
) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as queries, if the kernel needs it."""
    repeat = query.shape[1] // key.shape[1]
    if repeat == 1 or not repeats_heads(query.device, masked=masked):
        return key, value
    return key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute the attention of one document, or of samples that are one document each.

    Shapes as in `confined_attention`. There may be more keys than queries: the last query reads the
    last key.
    """
    reaches_all = scores.window is None or scores.window >= key.shape[2]
    drops_on_cpu = scores.dropout > 0 and query.device.type == "cpu"
    is_square = query.shape[2] == key.shape[2]
    if reaches_all and scores.cap is None and is_square and not drops_on_cpu:
        key, value = repeat_heads(query, key, value, masked=False)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=scores.dropout,
            is_causal=True,
            scale=scores.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return torch.cat(list(_blocks(query, key, value, scores)), dim=2)


def _blocks(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Iterator[Tensor]:
    """Yield the output of each block of queries, [b, h, queries, d].

    The blocks of keys and values are concatenated when the block is computed, so nothing but views
    of keys and values is stored for the backward pass.
    """
    size = query_block(query.device)
    offset = key.shape[2] - query.shape[2]  # of the first query in the keys
    before, start = divmod(offset, size)  # blocks of keys before the first query
    lead, before = (start, before + 1) if start else (size, before)  # a short one comes first
    queries = query.split(size, dim=2)
    sizes = [lead, *[size] * before][:before] + [block.shape[2] for block in queries]
    keys, values = key.split(sizes, dim=2), value.split(sizes, dim=2)
    for number, block in enumerate(queries, before):
        at, first = offset + (number - before) * size, 0
        if scores.window is not None:
            first = max(0, at - scores.window + 1 - lead + size) // size
        read = slice(first, number + 1)
        skipped = lead + (first - 1) * size if first else 0
        compute = partial(_block, scores, at - skipped, number + 1 - first)
        yield checkpoint(
            compute,
            block,
            *keys[read],
            *values[read],
            use_reentrant=False,
            preserve_rng_state=scores.dropout > 0,
        )


def _block(scores: Scores, offset: int, count: int, query: Tensor, *parts: Tensor) -> Tensor:
    """Compute the output of one block of queries, [b, h, n, d].

    The first query is number `offset` of the keys. The parts are `count` blocks of keys, then those
    of values, [b, g, at most the size of a block, d] each.
    """
    key, value = torch.cat(parts[:count], dim=2), torch.cat(parts[count:], dim=2)
    distance = torch.arange(offset, offset + query.shape[2], device=query.device)[:, None]
    distance = distance - torch.arange(key.shape[2], device=query.device)
    is_read = distance >= 0
    if scores.window is not None:
        is_read &= distance < scores.window
    if scores.cap is not None:
        return _capped(query, key, value, is_read, scores)
    key, value = repeat_heads(query, key, value, masked=True)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=is_read,
        dropout_p=scores.dropout,
        scale=scores.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _capped(query: Tensor, key: Tensor, value: Tensor, is_read: Tensor, scores: Scores) -> Tensor:
    """Compute attention with capped scores, which are stored in fp32 while it is computed.

    Shapes: query [b, h, n, d], key and value [b, g, t, d], is_read [n, t] bool, false at masked
    scores.
    """
    assert scores.cap is not None
    groups, (rows, width) = key.shape[1], query.shape[2:]
    scale = width**-0.5 if scores.scale is None else scores.scale
    grouped: Any = query.unflatten(1, (groups, -1)).flatten(2, 3)  # [b, g, h / g * n, d]
    products = (grouped @ key.transpose(2, 3)).float().unflatten(2, (-1, rows))
    capped = scores.cap * torch.tanh(products * (scale / scores.cap))
    weights = capped.masked_fill(~is_read, -torch.inf).softmax(-1).to(value.dtype)
    weights = F.dropout(weights, scores.dropout)
    output: Tensor = weights.flatten(2, 3) @ value
    return output.unflatten(2, (-1, rows)).flatten(1, 2)
