"""Compute attention by torch's kernels, as a core of megatron's layers.

The backward pass never needs a stored matrix of all scores (queries times keys). In most cases
torch's flash attention is used, which is available on CUDA, ROCm and CPU. It cannot compute the
gradient of relative positions, and on a CPU it has no dropout. In these two cases attention is
computed in blocks of queries, and each block is computed again in the backward pass. On a GPU,
FlexAttention can compute relative positions instead (flex.py). Windows, documents and capped scores
are in confined.py.

Without a suitable kernel torch silently computes the whole matrix of queries times keys, which
takes much more time and memory. The choice depends on the GPU, the dtype, the widths and the mask.
`attention_kernels` finds the kernels that torch chooses, before the first step.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from frontier_llm.errors import ConfigError
from frontier_llm.geometry.flops import equal_layers
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.confined import (
    Documents,
    Scores,
    confined_attention,
    query_block,
    repeat_heads,
    repeats_heads,
)
from frontier_llm.model.cut_samples import ContextPart
from frontier_llm.model.flex import FlexMasks, FlexScores, uses_flex
from frontier_llm.model.relative import block_bias
from frontier_llm.model.transformer import DTYPES

NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}


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
        attention_bias: Tensor | FlexScores | FlexMasks | Documents | ContextPart | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the attention output, [s, b, h * d], with the dtype of the query.

        Queries are [s, b, h, d], keys and values [t, b, g, d], where g divides h; t = s if causal.
        The mask is [b, t] bool, false at padding. It must be None if causal, because causal inputs
        have padding only at the end. The bias is [2r + 1, h], the number that is added to a score
        for each distance (key position - query position) from -r to r (see `RelativePositions`);
        or, for FlexAttention, the bias and the mask; or the documents of the samples, of which a
        token reads its own only; or the part of the samples that this context rank has.
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
            if isinstance(attention_bias, ContextPart):
                keeps = self.config.recompute_granularity is not None
                context_bhsd = attention_bias.attend(query, key, value, scores, keeps=keeps)
            elif isinstance(attention_bias, FlexScores):
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
        """Compute the output of one block of queries, which begins at token `start`."""
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


def attention_kernels(layout: ResolvedLayout, device: torch.device) -> dict[str, str]:
    """Return the kernel of each kind of attention, such as `{"causal": "flash"}`.

    Some memory is allocated on the device for a moment. On a GPU, attention is refused that would
    compute whole matrices, not blocks of queries.
    """
    kernels, flex = {}, uses_flex(layout.attention, device)
    for kind in _kinds(layout):
        if (kind.relative or kind.is_confined) and flex:
            kernels[kind.name] = "FlexAttention, as attention=flex asks for"
            continue
        if kind.capped:
            kernels[kind.name] = "matrix products, in blocks of queries"
            continue
        blocks = kind.window is not None or in_blocks(
            device, layout.model.attention_dropout, relative=kind.relative
        )
        kernel = NAMES[SDPBackend(torch._fused_sdp_choice(**_call(layout, device, kind, blocks)))]
        if kernel == "math" and not blocks and device.type != "cpu":
            raise ConfigError(
                "model.head_dim",
                f"{layout.model.head_dim} in {layout.precision}, for which torch has no attention "
                f"kernel on {torch.cuda.get_device_name(device)}",
                "a width and a precision with a kernel that does not store queries times keys",
                "set precision=bf16 or fp16, and a width that is a multiple of 8 and at most 256",
            )
        kernels[kind.name] = f"{kernel}, in blocks of queries" if blocks else kernel
        if kind.separate:
            kernels[kind.name] += ", one document at a time"
        if (kind.relative or kind.is_confined) and layout.attention == "flex":
            kernels[kind.name] += " (attention=flex is for GPUs)"
    return kernels


class _Kind(NamedTuple):
    """A kind of attention of a model."""

    name: str
    queries: int
    keys: int
    causal: bool = False
    relative: bool = False
    """Whether relative positions are added to the scores."""
    window: int | None = None
    """Keys that a query reads at most; None = no window."""
    capped: bool = False
    separate: bool = False

    @property
    def is_confined(self) -> bool:
        """Whether confined.py computes it."""
        return self.window is not None or self.capped or self.separate


def _kinds(layout: ResolvedLayout) -> Iterator[_Kind]:
    encoder, decoder = layout.lengths.encoder, layout.lengths.decoder
    if layout.model.kind == "gpt":
        capped = layout.model.attention_softcap is not None
        for layers in equal_layers(layout.model, range(layout.model.layers)):
            window = layout.model.layer_window(layers[0])
            name = "causal" if window is None else f"window of {window} tokens"
            separate = layout.documents == "separate"
            yield _Kind(name, decoder, decoder, True, False, window, capped, separate)
        return
    yield _Kind("encoder", encoder, encoder, relative=True)
    yield _Kind("decoder", decoder, decoder, causal=True, relative=True)
    yield _Kind("cross", decoder, encoder)


def _call(
    layout: ResolvedLayout, device: torch.device, kind: _Kind, blocks: bool
) -> dict[str, Any]:
    """Return the arguments with which SdpaAttention calls torch for one sample, without contents.

    In blocks of queries they are those of the last block, which reads all keys, or those of its
    window.
    """
    model, tensor, dtype = layout.model, layout.grid.tensor, DTYPES[layout.precision]
    heads, key_heads = model.heads // tensor, model.kv_heads // tensor
    queries = min(query_block(device), kind.queries) if blocks else kind.queries
    keys = kind.keys
    if kind.window is not None:
        keys = min(keys, queries + kind.window - 1)
    is_masked = kind.relative or blocks or not kind.causal
    if repeats_heads(device, masked=is_masked):
        key_heads = heads
    query, key, value = (
        # as megatron's layers make them: [tokens, samples, heads, width], permuted
        torch.empty(
            tokens, 1, count, model.head_dim, dtype=dtype, device=device
        ).requires_grad_().permute(1, 2, 0, 3)
        for tokens, count in ((queries, heads), (keys, key_heads), (keys, key_heads))
    )  # fmt: skip
    mask = None
    if kind.relative:
        mask = torch.empty(1, heads, queries, keys, dtype=dtype, device=device)
        mask.requires_grad_()
    elif is_masked:  # of a block, or of padding
        rows = queries if kind.causal else 1
        mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device)
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "dropout_p": 0.0 if device.type == "cpu" else model.attention_dropout,
        "is_causal": kind.causal and not blocks,
        "enable_gqa": key_heads != heads,
    }
