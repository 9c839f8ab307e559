"""Compute attention by torch's FlexAttention, on a GPU.

FlexAttention generates kernels from a function that changes a score. For relative positions the
function adds the bias of a distance, which the kernels read while they compute a score, so that no
bias per query and key is stored. The backward kernel adds the gradients of all scores of a distance
with atomic operations, whose order changes from run to run.

The kernels skip blocks of scores that are all masked. Which blocks these are is computed from the
bounds, and from the first and last document of each block, without a matrix of queries times keys.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from frontier_llm.model.attention import recomputed
from frontier_llm.model.reads import Reads, Scores
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
    """Return whether FlexAttention computes scores that flash attention does not."""
    return {"sdpa": False, "flex": True}[attention] and device.type in DEVICES


def needs_flex(reads: Reads, scores: Scores, *, has_documents: bool) -> bool:
    """Return whether flash attention does not compute these scores of a self-attention."""
    has_window = reads.before is not None
    return has_window or has_documents or scores.bias is not None or scores.cap is not None


@dataclass(frozen=True)
class FlexKernel:
    """The kernel of the layers of one forward pass that read the same keys."""

    blocks: BlockMask | None
    """The masked scores; None if no score is masked."""
    bias: Tensor | None = None
    """[h, 2s - 1] fp32 for s tokens, the bias of each distance (key position - query position) from
    1 - s to s - 1. One number per distance, also if distances share a bucket: the backward kernel
    would add too many gradients to the same number."""

    @classmethod
    def of(
        cls, reads: Reads, tokens: int, device: torch.device, distance_bias: Tensor | None = None
    ) -> "FlexKernel":
        """Prepare the self-attentions of one forward pass over s tokens.

        `distance_bias` is that of `Scores`, the output of `RelativePositions`.
        """
        has_documents = reads.queries is not None or reads.keys is not None
        find_blocks = _blocks if has_documents else _blocks_of_whole_samples
        blocks = find_blocks(reads, tokens, device)
        if distance_bias is None:
            return cls(blocks)
        distances = torch.arange(1 - tokens, tokens, device=device)
        return cls(blocks, diagonal_bias(distance_bias.float(), distances).contiguous())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores
    ) -> Tensor:
        """Compute the output without dropout, with the shapes of `attend` in attention.py."""
        assert scores.dropout == 0, "FlexAttention has no dropout"
        run = partial(_run, self, scores)
        if not scores.recompute:
            return run(query, key, value)
        return recomputed(run, query, key, value, dropout=0.0)


def _run(kernel: FlexKernel, scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bias = kernel.bias
    middle = 0 if bias is None else bias.shape[1] // 2

    def add_bias(score: Any, _: Any, head: Any, query_at: Any, key_at: Any) -> Any:
        assert bias is not None
        return score + bias[head, key_at - query_at + middle]

    capped = None if scores.cap is None else partial(_capped, scores.cap)
    # trainer/callbacks/measurements.py may turn torch.compile off: all scores would be stored
    is_inside = torch.compiler.is_compiling()
    with nullcontext() if is_inside else torch.compiler.set_stance("default"):
        result: Tensor = _compiled(COMPILER)(
            query,
            key,
            value,
            score_mod=capped if bias is None else add_bias,
            block_mask=kernel.blocks,
            scale=scores.scale,
            enable_gqa=key.shape[1] != query.shape[1],
            kernel_options=OPTIONS,
        )
    return result


@cache
def _compiled(backend: str) -> Any:
    """Return the compiled function, which raises an error if torch cannot generate kernels."""
    return torch.compile(flex_attention, backend=backend, dynamic=False, fullgraph=True)


def _capped(cap: float, score: Any, *_: Any) -> Any:
    return cap * torch.tanh(score / cap)


def _blocks(reads: Reads, tokens: int, device: torch.device) -> BlockMask | None:
    """Describe the masked scores of s queries and as many keys; None if there are none."""
    if reads.before is None and reads.after is None and reads.keys is None:
        return None
    queries, keys = (None if side is None else side.ids for side in (reads.queries, reads.keys))

    def is_read(sample: Any, _: Any, query_at: Any, key_at: Any) -> Any:
        is_within = reads.within(query_at - key_at)
        if keys is None:
            return is_within
        own = 1 if queries is None else queries[sample, query_at]
        return is_within & (keys[sample, key_at] == own)

    # the smallest and the largest distance of a query and a key of two blocks
    at = torch.arange(-(-tokens // BLOCK), device=device)
    nearest = (at[:, None] - at[None, :]) * BLOCK + 1 - BLOCK
    farthest = nearest + 2 * BLOCK - 2
    whole = reads.within(nearest) & reads.within(farthest)
    some = (nearest < (reads.before or tokens)) & (farthest > -(reads.after or tokens))
    if keys is not None:
        first, last = _documents_of_blocks(keys, tokens)
        own = torch.ones_like(first), torch.ones_like(first)
        own_first, own_last = own if queries is None else _documents_of_blocks(queries, tokens)
        # documents ascend
        some = some & (first[..., None, :] <= own_last[..., :, None])
        some = some & (last[..., None, :] >= own_first[..., :, None])
        is_one = (first == last)[..., None, :] & (own_first == own_last)[..., :, None]
        whole = whole & some & is_one
    else:
        whole, some = whole[None, None], some[None, None]
    return _block_mask(whole, some & ~whole, is_read, tokens)


_blocks_of_whole_samples = lru_cache(maxsize=8)(_blocks)


def _documents_of_blocks(ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last document of each block of tokens, [samples, 1, blocks] each."""
    # the end of the last block is like one more document
    padded = F.pad(ids, (0, -tokens % BLOCK), value=tokens + 1).unflatten(1, (-1, BLOCK))
    return padded[:, None, :, 0], padded[:, None, :, -1]


def _block_mask(whole: Tensor, partial: Tensor, is_read: Any, tokens: int) -> BlockMask:
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
