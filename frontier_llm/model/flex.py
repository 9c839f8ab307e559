"""Compute attention by torch's FlexAttention, on a GPU.

FlexAttention generates kernels from a function that changes a score. For relative positions
(`FlexScores`) the function adds the bias of a distance, which the kernels read while they compute a
score, so that no bias per query and key is stored. The backward kernel adds the gradients of all
scores of a distance with atomic operations, whose order changes from run to run.

The attention of confined.py (`FlexMasks`) has masked scores. The kernels skip blocks that are all
masked. Which blocks these are is computed from the first and last document of each block, without a
matrix of queries times keys.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from frontier_llm.model.confined import Documents, Scores
from frontier_llm.model.relative import diagonal_bias

COMPILER = "inductor"
DEVICES = ("cuda",)
"""Types of the devices on which FlexAttention has a backward pass. ROCm's type is `cuda` too."""
BLOCK = 128
"""Queries, and keys, of a block of scores that is skipped if all of them are masked."""
OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True, "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64}
"""Options of the kernels. Short sequences use the kernel of long ones. A program of the forward
kernel computes 64 x 64 scores at a time; with torch's default, 128 x 128 on a GPU of sm_90, reading
biases needs so many registers that thousands of bytes are spilled to memory."""


def uses_flex(attention: str, device: torch.device) -> bool:
    """Return whether relative positions are computed by FlexAttention."""
    return {"sdpa": False, "flex": True}[attention] and device.type in DEVICES


@dataclass(frozen=True)
class FlexScores:
    """The bias that a stack of layers adds to its attention scores, and the masked scores."""

    bias: Tensor
    """[heads, 2s - 1] fp32 for s tokens, the bias of each distance (key position - query position)
    from 1 - s to s - 1. One number per distance, also if distances share a bucket: the backward
    kernel would add too many gradients to the same number."""
    blocks: BlockMask | None
    """The masked scores; None if no score is masked."""

    @classmethod
    def of(
        cls, distance_bias: Tensor, tokens: int, mask: Tensor | None, *, causal: bool
    ) -> "FlexScores":
        """Prepare the attentions of one forward pass over s tokens.

        `distance_bias` is [2r + 1, heads], the output of `RelativePositions`. The mask is [samples,
        s] bool, false at padding; None if there is no padding, and if causal.
        """
        distances = torch.arange(1 - tokens, tokens, device=distance_bias.device)
        bias = diagonal_bias(distance_bias.float(), distances).contiguous()
        if causal:
            return cls(bias, _causal_blocks(tokens, bias.device))
        return cls(bias, None if mask is None else _padding_blocks(mask))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention output, [b, h, s, d], with the dtype of the query.

        The query is [b samples, h heads, s tokens, d]; key and value are [b, g, s, d], where g
        divides h. Scores are scaled before the bias is added; None = by 1 / sqrt(d).
        """
        bias, middle = self.bias, self.bias.shape[1] // 2

        def add_bias(score: Any, _: Any, head: Any, query_at: Any, key_at: Any) -> Any:
            return score + bias[head, key_at - query_at + middle]

        return run_flex(query, key, value, add_bias, self.blocks, scale)


def run_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    change_score: Any,
    blocks: BlockMask | None,
    scale: float | None,
) -> Tensor:
    """Compute attention by generated kernels, with the shapes of `FlexScores.attend`.

    `change_score` is a function of (score, sample, head, query, key), called after scores are
    scaled.
    """
    # trainer/callbacks/measurements.py may turn torch.compile off: all scores would be stored
    is_inside = torch.compiler.is_compiling()
    with nullcontext() if is_inside else torch.compiler.set_stance("default"):
        result: Tensor = _compiled(COMPILER)(
            query,
            key,
            value,
            score_mod=change_score,
            block_mask=blocks,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
            kernel_options=OPTIONS,
        )
    return result


@cache
def _compiled(backend: str) -> Any:
    """Return the compiled function, which raises an error if torch cannot generate kernels."""
    return torch.compile(flex_attention, backend=backend, dynamic=False, fullgraph=True)


def _causal_blocks(tokens: int, device: torch.device) -> BlockMask:
    """Mask keys after the query."""

    def is_read(_: Any, __: Any, query_at: Any, key_at: Any) -> Any:
        return key_at <= query_at

    at = torch.arange(-(-tokens // BLOCK), device=device)
    before, same = at[None, :] < at[:, None], at[None, :] == at[:, None]
    return block_mask(before[None, None], same[None, None], is_read, tokens)


def _padding_blocks(mask: Tensor) -> BlockMask:
    """Mask the keys that are padding: [samples, s] bool, true at tokens."""

    def is_read(sample: Any, _: Any, __: Any, key_at: Any) -> Any:
        return mask[sample, key_at]

    samples, tokens = mask.shape
    count = -(-tokens // BLOCK)
    of_block = F.pad(mask, (0, count * BLOCK - tokens)).view(samples, 1, 1, count, BLOCK)
    whole, any_token = (x.expand(-1, -1, count, -1) for x in (of_block.all(-1), of_block.any(-1)))
    return block_mask(whole, any_token & ~whole, is_read, tokens)


def block_mask(whole: Tensor, partial: Tensor, is_read: Any, tokens: int) -> BlockMask:
    """Describe the blocks of scores, without a matrix of queries times keys.

    Both tensors are [1 or samples, 1, blocks of queries, blocks of keys] bool: whole blocks have no
    masked score, partial blocks have some. `is_read` is a function of (sample, head, query, key),
    true where a score is not masked, which is called in partial blocks only.
    """
    (partial_count, partial_at), (whole_count, whole_at) = map(_ordered, (partial, whole))
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_at,
        whole_count,
        whole_at,
        BLOCK_SIZE=BLOCK,
        mask_mod=is_read,
        seq_lengths=(tokens, tokens),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true values per row of [..., n], and all positions, true first."""
    positions = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), positions.int()


@dataclass(frozen=True)
class FlexMasks:
    """The masked scores of all layers of one forward pass."""

    blocks: dict[int | None, BlockMask]
    """For each window of a layer (None = no window) the masked scores."""

    @classmethod
    def of(
        cls,
        windows: Iterable[int | None],
        tokens: int,
        documents: Documents | None,
        device: torch.device,
    ) -> "FlexMasks":
        """Describe the masked scores."""
        if documents is None:
            return cls({window: _whole_samples(window, tokens, device) for window in windows})
        return cls({window: _confined_blocks(window, tokens, documents.ids) for window in windows})

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute the output without dropout, with the shapes of `confined_attention`."""
        assert scores.dropout == 0, "FlexAttention has no dropout"
        change = None if scores.cap is None else partial(_capped, scores.cap)
        blocks = self.blocks[scores.window]
        return run_flex(query, key, value, change, blocks, scores.scale)


def _capped(cap: float, score: Any, *_: Any) -> Any:
    return cap * torch.tanh(score / cap)


@lru_cache(maxsize=8)
def _whole_samples(window: int | None, tokens: int, device: torch.device) -> BlockMask:
    """Return the masked scores if each sample is one document."""
    reach = tokens if window is None else window

    def is_read(_: Any, __: Any, query_at: Any, key_at: Any) -> Any:
        distance = query_at - key_at
        return (distance >= 0) & (distance < reach)

    every, some = _within_reach(reach, tokens, device)
    return block_mask(every[None, None], (some & ~every)[None, None], is_read, tokens)


def _confined_blocks(window: int | None, tokens: int, ids: Tensor) -> BlockMask:
    """Mask keys after the query, before its window, and of other documents.

    `ids` are [samples, tokens] int64, the number of the document of each token, ascending.
    """
    reach = tokens if window is None else window

    def is_read(sample: Any, _: Any, query_at: Any, key_at: Any) -> Any:
        distance = query_at - key_at
        same_document = ids[sample, query_at] == ids[sample, key_at]
        return (distance >= 0) & (distance < reach) & same_document

    count = -(-tokens // BLOCK)
    # the padding is like one more document
    padded = F.pad(ids, (0, count * BLOCK - tokens), value=tokens + 1)
    by_block = padded.view(len(ids), 1, count, BLOCK)
    first, last = by_block[..., 0], by_block[..., -1]
    every, some = _within_reach(reach, tokens, ids.device)
    # documents ascend: two blocks are one document if the first key's is the last query's
    every = every & (first[..., None, :] == last[..., :, None])
    some = some & (last[..., None, :] >= first[..., :, None])
    return block_mask(every, some & ~every, is_read, tokens)


def _within_reach(reach: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the blocks of scores whose keys are all in reach, and those with any such key.

    A query reads its own key and the `reach` - 1 keys before it. Both results are [blocks of
    queries, blocks of keys] bool.
    """
    at = torch.arange(-(-tokens // BLOCK), device=device)
    apart = at[:, None] - at[None, :]
    every = (apart > 0) & ((apart + 1) * BLOCK - 1 < reach)
    some = (apart >= 0) & ((apart - 1) * BLOCK + 1 < reach)
    return every, some
