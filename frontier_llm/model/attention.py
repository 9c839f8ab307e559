"""Compute attention by torch's kernels, as a core of megatron's layers.

The backward pass never needs a stored matrix of all scores (queries times keys). In most cases
torch's flash attention is used, which is available on CUDA, ROCm and CPU. It cannot compute the
gradient of relative positions, and on a CPU it has no dropout. In these two cases attention is
computed in blocks of queries, and each block is computed again in the backward pass. On a GPU,
FlexAttention can compute relative positions instead (flex.py). Windows, documents and capped scores
are in confined.py.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from frontier_llm.model.confined import (
    Documents,
    Scores,
    confined_attention,
    query_block,
    repeat_heads,
)
from frontier_llm.model.flex import FlexMasks, FlexScores
from frontier_llm.model.relative import block_bias


def in_blocks(device: torch.device, dropout: float, *, relative: bool) -> bool:
    """Return whether attention without FlexAttention is computed in blocks of queries."""
    return relative or (dropout > 0 and device.type == "cpu")


class SdpaAttention(MegatronModule):
    """Computes softmax(scale * QK^T) V for the heads of one tensor-parallel rank.

    Letters in shapes and in names of tensors: s query tokens, t key tokens, b samples, h query
    heads and g key/value heads of this rank, head width d. The class replaces megatron's
    DotProductAttention and has the same signature, and has no parameters. The mask is causal, or
    padding (queries attend to all keys that are not padding). With `recompute` flash attention is
    computed again in the backward pass.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        recompute: bool = False,
        scores: Scores | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding):
            raise NotImplementedError(
                f"mask {attn_mask_type}: only causal and padding are supported"
            )
        self.causal = attn_mask_type == AttnMaskType.causal
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        self.recompute = recompute
        self.scores = replace(scores or Scores(), scale=softmax_scale)

    def forward(
        self,
        query_sbhd: Tensor,
        key_tbgd: Tensor,
        value_tbgd: Tensor,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | FlexScores | FlexMasks | Documents | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the attention output.

        Args:
            query_sbhd: queries, [s, b, h, d].
            key_tbgd: keys, [t, b, g, d], where g divides h; t = s if causal.
            value_tbgd: values, [t, b, g, d].
            attention_mask: [b, t] bool, true at tokens, false at padding; None if there is no
                padding. Must be None if causal, because causal inputs have padding only at the end.
            attention_bias: [2r + 1, h], the number that is added to a score, for each distance
                (key position - query position) from -r to r (see `RelativePositions`); or, for
                FlexAttention, the bias and the mask; or the documents of the samples, in which case
                a token reads its own document only; None = no bias, one document per sample.

        Returns:
            [s, b, h * d], with the dtype of the query.
        """
        assert not (self.causal and attention_mask is not None), "causal attention takes no mask"
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_sbhd, key_tbgd, value_tbgd))
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks have different heads, so they must draw different dropout masks.
        # With sequence parallelism the whole layer already runs with the rank's own random stream.
        needs_own_stream = dropout > 0 and not self.config.sequence_parallel
        scores = replace(self.scores, dropout=dropout)
        with get_cuda_rng_tracker().fork() if needs_own_stream else nullcontext():
            if isinstance(attention_bias, FlexScores):
                assert dropout == 0, "FlexAttention has no dropout"
                context_bhsd = attention_bias.attend(query, key, value, self.softmax_scale)
            elif isinstance(attention_bias, FlexMasks):
                context_bhsd = attention_bias.attend(query, key, value, scores)
            elif isinstance(attention_bias, Documents) or scores.is_confined:
                assert not isinstance(attention_bias, Tensor), "relative positions have no window"
                context_bhsd = confined_attention(query, key, value, scores, attention_bias)
            elif in_blocks(query.device, dropout, relative=attention_bias is not None):
                context_bhsd = self._by_blocks(query, key, value, mask, attention_bias, dropout)
            else:
                context_bhsd = self._flash(query, key, value, mask, dropout)
        return context_bhsd.permute(2, 0, 1, 3).flatten(2)

    def _flash(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
    ) -> Tensor:
        key, value = repeat_heads(query, key, value, masked=mask is not None)
        attend = partial(
            scaled_dot_product_attention,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=self.causal,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        if not self.recompute:
            return attend(query, key, value)
        recomputed: Tensor = _checkpointed(attend, query, key, value, dropout=dropout)
        return recomputed

    def _by_blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Compute the output in blocks of queries, so that few scores are in memory at a time."""
        block_size = query_block(query.device)
        starts = range(0, query.shape[2], block_size)
        query_blocks = query.split(block_size, dim=2)
        outputs = [
            _checkpointed(
                self._block, block, key, value, mask, bias, start, dropout, dropout=dropout
            )
            for start, block in zip(starts, query_blocks, strict=True)
        ]
        return torch.cat(outputs, dim=2)

    def _block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        start: int,
        dropout: float,
    ) -> Tensor:
        """Compute the output of one block of queries, which begins at token `start`.

        If attention is causal, keys after the block are not read.
        """
        positions = range(start, start + query.shape[2])
        key_count = positions.stop if self.causal else key.shape[2]
        if bias is not None:
            mask = block_bias(bias, positions, key_count, mask, causal=self.causal)
        elif self.causal:
            key_positions = torch.arange(key_count, device=query.device)
            mask = key_positions[None, :] <= key_positions[positions.start :, None]
        return scaled_dot_product_attention(
            query,
            key[:, :, :key_count],
            value[:, :, :key_count],
            attn_mask=mask,
            dropout_p=dropout,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )


def _checkpointed(function: Any, *arguments: Any, dropout: float) -> Any:
    """Call a function so that only its arguments are stored for the backward pass.

    The backward pass calls the function again, with the same random numbers if there is dropout.
    """
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)
