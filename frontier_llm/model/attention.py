"""The attention core: torch's scaled_dot_product_attention in megatron's slot.

No [s, t] matrix is kept for the backward pass: flash attention on CUDA, ROCm and CPU. Where no
kernel does that (with relative positions, whose gradient flash attention does not give, and with
dropout on a CPU) a path by blocks of queries computes each block again in the backward pass, as
flash attention does with its tiles.
"""

from contextlib import nullcontext
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

from frontier_llm.model.relative import block_bias

QUERY_BLOCK = 128
"""Queries of a block on a CPU."""
DEVICE_QUERY_BLOCK = 1024
"""Queries of a block elsewhere: enough to fill a GPU."""


class SdpaAttention(MegatronModule):
    """Softmax(QK^T) V on the heads of one tensor rank.

    s: tokens that ask, t: tokens that are asked, b: samples, h: query heads and g: key and value
    heads of this rank, d: head width. The signature is that of megatron's DotProductAttention,
    which it replaces in a layer spec.
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
        **_: Any,
    ) -> None:
        """Build the core.

        Args:
            config: megatron's.
            layer_number: unused; megatron passes it.
            attn_mask_type: causal, or padding: every key that is a token is seen.
            attention_type: unused.
            attention_dropout: of the probabilities; absent = the configuration's.
            softmax_scale: of the scores; absent = 1 / sqrt(d).
            recompute: whether the backward pass computes flash attention's output again.
        """
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding):
            raise NotImplementedError(f"mask {attn_mask_type}: only causal and padding are known")
        self.causal = attn_mask_type == AttnMaskType.causal
        wanted = config.attention_dropout if attention_dropout is None else attention_dropout
        self.dropout = wanted
        self.softmax_scale = softmax_scale
        self.recompute = recompute

    def forward(
        self,
        query_sbhd: Tensor,
        key_tbgd: Tensor,
        value_tbgd: Tensor,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query_sbhd: [s, b, h, d].
            key_tbgd: [t, b, g, d], g divides h; t = s if causal.
            value_tbgd: [t, b, g, d].
            attention_mask: [b, t] bool, true where a key is a token; None = everywhere. Must be
                None if causal: what pads is behind every token that counts.
            attention_bias: [2r + 1, h], what is added to the score of a key that lies -r..r
                tokens behind the query (RelativePositions); None = nothing.

        Returns:
            [s, b, h * d], the dtype of the query.
        """
        assert not (self.causal and attention_mask is not None), "causal attention takes no mask"
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_sbhd, key_tbgd, value_tbgd))
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        # each tensor rank drops other heads' entries (under sequence parallel the whole layer
        # already draws from the rank's own stream)
        own_masks = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if own_masks else nullcontext():
            if attention_bias is not None or (dropout and query.device.type == "cpu"):
                context_bhsd = self._by_blocks(query, key, value, mask, attention_bias, dropout)
            else:
                context_bhsd = self._flash(query, key, value, mask, dropout)
        return context_bhsd.permute(2, 0, 1, 3).flatten(2)

    def _flash(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
    ) -> Tensor:
        grouped = key.shape[1] != query.shape[1]
        if grouped and query.device.type == "cpu":
            # the CPU's flash kernel wants as many key heads; repeating them is linear in s
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            grouped = False
        attend = partial(
            scaled_dot_product_attention,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=self.causal,
            scale=self.softmax_scale,
            enable_gqa=grouped,
        )
        if not self.recompute:
            return attend(query, key, value)
        again: Tensor = _checkpointed(attend, query, key, value, dropout=dropout)
        return again

    def _by_blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Attend, holding [block, t] scores at a time."""
        length = QUERY_BLOCK if query.device.type == "cpu" else DEVICE_QUERY_BLOCK
        blocks = [
            _checkpointed(
                self._block, block, key, value, mask, bias, start, dropout, dropout=dropout
            )
            for start, block in zip(
                range(0, query.shape[2], length), query.split(length, dim=2), strict=True
            )
        ]
        return torch.cat(blocks, dim=2)

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
        """Attend with the queries from `start` on."""
        rows = range(start, start + query.shape[2])
        keys = rows.stop if self.causal else key.shape[2]
        if bias is not None:
            mask = block_bias(bias, rows, keys, mask, causal=self.causal)
        elif self.causal:
            places = torch.arange(keys, device=query.device)
            mask = places[None, :] <= places[rows.start :, None]
        return scaled_dot_product_attention(
            query,
            key[:, :, :keys],
            value[:, :, :keys],
            attn_mask=mask,
            dropout_p=dropout,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )


def _checkpointed(function: Any, *arguments: Any, dropout: float) -> Any:
    """Call a function, keep its arguments alone, and call it again in the backward pass."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)
