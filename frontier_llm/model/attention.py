"""The attention core: torch's scaled_dot_product_attention in megatron's slot.

No [s, s] matrix is kept: flash attention on CUDA, ROCm and CPU. The CPU's kernel has no dropout,
so there (and only there) dropout takes a path by blocks of queries, each recomputed in backward.
"""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 128


class SdpaAttention(MegatronModule):
    """Softmax(QK^T) V on the heads of one tensor rank, causal.

    s: tokens, b: samples, h: query heads and g: key and value heads of this rank, d: head width.
    The signature is that of megatron's DotProductAttention, which it replaces in a layer spec.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal:
            raise NotImplementedError(f"mask {attn_mask_type}: only causal attention is known")
        wanted = config.attention_dropout if attention_dropout is None else attention_dropout
        self.dropout = wanted
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_sbhd: Tensor,
        key_sbgd: Tensor,
        value_sbgd: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query_sbhd: [s, b, h, d].
            key_sbgd: [s, b, g, d], g divides h.
            value_sbgd: [s, b, g, d].
            attention_mask: must be None; causality is built in.

        Returns:
            [s, b, h * d], the dtype of the query.
        """
        assert attention_mask is None, "causal attention takes no mask"
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_sbhd, key_sbgd, value_sbgd))
        dropout = self.dropout if self.training else 0.0
        if dropout and query.device.type == "cpu":
            context_bhsd = self._by_blocks(query, key, value, dropout)
        else:
            context_bhsd = self._flash(query, key, value, dropout)
        return context_bhsd.permute(2, 0, 1, 3).flatten(2)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        grouped = key.shape[1] != query.shape[1]
        if grouped and query.device.type == "cpu":
            # the CPU's flash kernel wants as many key heads; repeating them is linear in s
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            grouped = False
        # each tensor rank drops other heads' entries (under sequence parallel the whole layer
        # already draws from the rank's own stream)
        own_masks = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if own_masks else nullcontext():
            return scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=grouped,
            )

    def _by_blocks(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Attend with dropout where no kernel fuses it, holding [block, s] scores at a time."""
        with get_cuda_rng_tracker().fork():
            blocks = [
                checkpoint(self._block, block, key, value, start, dropout, use_reentrant=False)
                for start, block in zip(
                    range(0, query.shape[2], QUERY_BLOCK),
                    query.split(QUERY_BLOCK, dim=2),
                    strict=True,
                )
            ]
        return torch.cat(blocks, dim=2)

    def _block(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, dropout: float
    ) -> Tensor:
        end = start + query.shape[2]
        rows = torch.arange(start, end, device=query.device)[:, None]
        visible = torch.arange(end, device=query.device)[None, :] <= rows
        return scaled_dot_product_attention(
            query,
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=visible,
            dropout_p=dropout,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
