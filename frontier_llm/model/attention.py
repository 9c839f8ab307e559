"""Compute attention by torch's kernels.

The backward pass never needs a stored matrix of all scores (queries times keys). In most cases
torch's flash attention is used, which is available on CUDA, ROCm and CPU. It has no windows, no
bound of scores and no gradient of relative positions, and on a CPU it has no dropout. In these
cases attention is computed in blocks of queries, and each block is computed again in the backward
pass. A block reads no keys outside the bounds of its queries, so that the time of a window is
proportional to tokens * (window + block). Each of the separate documents is computed by itself.

On a GPU, FlexAttention can compute the same (flex.py).

Without a suitable kernel torch silently computes the whole matrix of queries times keys, which
takes much more time and memory. attention_kernels.py finds out before the first step.

Letters in shapes and in names of tensors: s query tokens, t key tokens, b samples, h query heads
and g key/value heads of this tensor-parallel rank, where g divides h, head width d.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from frontier_llm.geometry.state_memory import CPU_QUERY_BLOCK, QUERY_BLOCK
from frontier_llm.model.reads import Reads, Scores
from frontier_llm.model.relative import block_bias


def query_block(device: torch.device) -> int:
    """Return the number of queries per block, if attention is computed in blocks."""
    return CPU_QUERY_BLOCK if device.type == "cpu" else QUERY_BLOCK


class SdpaAttention(nn.Module):
    """Computes softmax(scale * QK^T) V for the heads of one tensor-parallel rank.

    With `own_stream` dropout draws from the random stream of this rank: tensor-parallel ranks have
    different heads, so they must draw different masks.
    """

    def __init__(self, scores: Scores, *, own_stream: bool = True) -> None:
        super().__init__()
        self.scores, self._own_stream = scores, own_stream

    def forward(
        self,
        query_sbhd: Tensor,
        key_tbgd: Tensor,
        value_tbgd: Tensor,
        reads: Reads,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention output, [s, b, h * d], with the dtype of the query.

        Queries are [s, b, h, d], keys and values [t, b, g, d]. The bias is that of `Scores`.
        """
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_sbhd, key_tbgd, value_tbgd))
        dropout = self.scores.dropout if self.training else 0.0
        scores = replace(self.scores, dropout=dropout, bias=bias)
        run = attend if reads.kernel is None else reads.kernel.attend
        uses_own_stream = dropout > 0 and self._own_stream
        with get_cuda_rng_tracker().fork() if uses_own_stream else nullcontext():
            context_bhsd = run(query, key, value, reads, scores)
        return context_bhsd.permute(2, 0, 1, 3).flatten(2)


def attend(query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores) -> Tensor:
    """Compute attention: [b, h, s, d], with the dtype of the query.

    The query is [b, h, s, d]; key and value are [b, g, t, d].
    """
    if reads.queries is None:
        return attend_document(query, key, value, reads, scores)
    return _attend_documents(query, key, value, reads, scores)


@torch._disable_dynamo  # torch.compiler.disable would import the compiler here, in half a second
def _attend_documents(
    query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores
) -> Tensor:
    assert reads.queries is not None
    assert reads.keys is not None
    samples, lengths = [], (reads.queries.lengths, reads.keys.lengths)
    contexts: list[list[int]] = [[] for _ in lengths[0]]
    if reads.context_keys is not None:
        contexts = reads.context_keys.lengths
    within = replace(reads, queries=None, keys=None, context_keys=None)
    for *sample, queries, keys, context in zip(query, key, value, *lengths, contexts, strict=True):
        # one `split` per tensor, whose gradient is one tensor; a slice would have a whole one
        sizes = queries, context + keys, context + keys
        of_query, *others = (x[None].split(n, dim=2) for x, n in zip(sample, sizes, strict=True))
        # if the keys have one more document, it is padding, which no query reads
        outputs = []
        for number, part in enumerate(of_query):
            own, (k, v) = within, (x[len(context) + number] for x in others)
            if context:
                k, v = (
                    torch.cat([x[number], y], dim=2) for x, y in zip(others, (k, v), strict=True)
                )
                own = replace(within, context=context[number])
            outputs.append(attend_document(part, k, v, own, scores))
        samples.append(torch.cat(outputs, dim=2))
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


def in_blocks(reads: Reads, scores: Scores, queries: int, keys: int, device: torch.device) -> bool:
    """Return whether attention of one document is computed in blocks of queries."""
    drops_on_cpu = scores.dropout > 0 and device.type == "cpu"
    is_changed = scores.bias is not None or scores.cap is not None
    return is_changed or drops_on_cpu or not reads.is_whole(queries, keys)


def attend_document(
    query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores, first: int = 0
) -> Tensor:
    """Compute the attention of one document, or of samples that are one document each.

    Shapes are those of `attend`. `first` is the position of the first query among the keys that
    follow the context.
    """
    if in_blocks(reads, scores, query.shape[2], key.shape[2], query.device):
        return torch.cat(list(_blocks(query, key, value, reads, scores, first)), dim=2)
    run = partial(_product, scores=scores, mask=reads.key_mask, is_causal=reads.after == 1)
    if not scores.recompute:
        return run(query, key, value)
    return recomputed(run, query, key, value, dropout=scores.dropout)


def recomputed(function: Any, *arguments: Tensor, dropout: float) -> Tensor:
    """Call a function so that only its arguments are stored for the backward pass.

    The backward pass calls the function again, with the same random numbers if there is dropout.
    """
    result: Tensor = checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0
    )
    return result


def _product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    mask: Tensor | None,
    is_causal: bool = False,
) -> Tensor:
    """Call torch's attention. The mask is bool, false at masked scores, or is added to scores."""
    key, value = repeat_heads(query, key, value, masked=mask is not None)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=scores.dropout,
        is_causal=is_causal,
        scale=scores.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores, first: int
) -> Iterator[Tensor]:
    """Yield the output of each block of queries, [b, h, queries, d].

    Blocks of keys begin where blocks of queries do; the context is one more block. They are
    concatenated when the block is computed, so nothing but views of keys and values is stored for
    the backward pass.
    """
    size, tokens = query_block(query.device), key.shape[2] - reads.context
    borders = [0, *range(first % size or size, tokens, size), tokens]
    sizes = [reads.context, *(stop - start for start, stop in pairwise(borders))]
    (key, *keys), (value, *values) = key.split(sizes, dim=2), value.split(sizes, dim=2)
    before = ([key], [value]) if reads.context else ([], [])
    mask = reads.key_mask
    for block in query.split(size, dim=2):
        positions = range(first, first + block.shape[2])
        read = reads.key_range(positions, tokens)
        used = slice(bisect_right(borders, read.start) - 1, bisect_left(borders, read.stop))
        at, stop = borders[used.start], borders[used.stop]
        own_mask = None
        if mask is not None:
            own_mask = F.pad(mask, (0, stop - at), value=True) if before[0] else mask[..., at:stop]
        offsets = range(positions.start - at, positions.stop - at)
        compute = partial(_block, reads, scores, offsets, own_mask)
        parts = *before[0], *keys[used], *before[1], *values[used]
        yield recomputed(compute, block, *parts, dropout=scores.dropout)
        first = positions.stop


def _block(
    reads: Reads,
    scores: Scores,
    positions: range,
    key_mask: Tensor | None,
    query: Tensor,
    *parts: Tensor,
) -> Tensor:
    """Compute the output of one block of queries, [b, h, n, d].

    The positions are those of the n queries among the keys that follow the context. The parts are
    blocks of keys, then as many blocks of values, [b, g, tokens, d] each. The mask is that of the
    keys, [b, 1, 1, t] bool.
    """
    count = len(parts) // 2
    key, value = torch.cat(parts[:count], dim=2), torch.cat(parts[count:], dim=2)
    if scores.bias is not None:
        mask = block_bias(scores.bias, positions, key.shape[2], reads, key_mask)
        return _product(query, key, value, scores, mask)
    at = torch.arange(positions.start, positions.stop, device=query.device)[:, None]
    own_keys = torch.arange(key.shape[2] - reads.context, device=query.device)
    mask = F.pad(reads.within(at - own_keys), (reads.context, 0), value=True)
    if key_mask is not None:
        mask = mask & key_mask
    if scores.cap is not None:
        return _capped(query, key, value, mask, scores, scores.cap)
    return _product(query, key, value, scores, mask)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, is_read: Tensor, scores: Scores, cap: float
) -> Tensor:
    """Compute attention with capped scores, which are stored in fp32 while it is computed.

    Shapes: query [b, h, n, d], key and value [b, g, t, d], is_read [n, t] or [b, 1, n, t] bool,
    false at masked scores.
    """
    groups, (rows, width) = key.shape[1], query.shape[2:]
    scale = width**-0.5 if scores.scale is None else scores.scale
    grouped: Any = query.unflatten(1, (groups, -1)).flatten(2, 3)  # [b, g, h / g * n, d]
    products = (grouped @ key.transpose(2, 3)).float().unflatten(2, (-1, rows))
    capped = cap * torch.tanh(products * (scale / cap))
    is_masked = ~is_read if is_read.dim() == 2 else ~is_read[:, None]
    weights = capped.masked_fill(is_masked, -torch.inf).softmax(-1).to(value.dtype)
    weights = F.dropout(weights, scores.dropout)
    output: Tensor = weights.flatten(2, 3) @ value
    return output.unflatten(2, (-1, rows)).flatten(1, 2)
