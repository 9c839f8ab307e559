"""Compute the attention of confined.py by torch's FlexAttention, on a GPU.

The kernels skip blocks of scores that are all masked. Which blocks these are is computed from the
first and last document of each block, without a matrix of queries times keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from frontier_llm.model.confined import Documents, Scores
from frontier_llm.model.flex import BLOCK, block_mask, run_flex


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
