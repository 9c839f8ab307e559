"""Find the attention kernels that torch chooses, before the first step.

The choice depends on the GPU, the dtype, the widths and the mask.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from frontier_llm.config.model import ModelConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.flops import equal_layers
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.attention import in_blocks, query_block, repeats_heads
from frontier_llm.model.flex import needs_flex, uses_flex
from frontier_llm.model.reads import Reads, Scores
from frontier_llm.model.transformer import DTYPES

NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}


def attention_kernels(layout: ResolvedLayout, device: torch.device) -> dict[str, str]:
    """Return the kernel of each kind of attention, such as `{"causal": "flash"}`.

    Some memory is allocated on the device for a moment. On a GPU, attention is refused that would
    compute whole matrices, not blocks of queries.
    """
    kernels, flex = {}, uses_flex(layout.attention, device)
    for kind in _kinds(layout):
        if kind.suits_flex and flex:
            kernels[kind.name] = "FlexAttention, as attention=flex asks for"
            continue
        if kind.scores.cap is not None:
            kernels[kind.name] = "matrix products, in blocks of queries"
            continue
        blocks = in_blocks(kind.reads, kind.scores, kind.queries, kind.keys, device)
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
        if kind.suits_flex and layout.attention == "flex":
            kernels[kind.name] += " (attention=flex is for GPUs)"
    return kernels


class _Kind(NamedTuple):
    """A kind of attention of a model."""

    name: str
    queries: int
    keys: int
    reads: Reads
    scores: Scores
    side: ModelConfig
    """The model with the dimensions of the attention."""
    separate: bool = False

    @property
    def suits_flex(self) -> bool:
        """Whether FlexAttention computes it, if that is asked for."""
        return needs_flex(self.reads, self.scores, has_documents=self.separate)


def _kinds(layout: ResolvedLayout) -> Iterator[_Kind]:
    """Yield each kind of attention, in the order of the forward pass."""
    model, lengths = layout.model, layout.lengths
    plain = Scores(dropout=model.attention_dropout, cap=model.attention_softcap)
    has_bias = model.positions == "relative"
    scores = replace(plain, bias=torch.empty(0)) if has_bias else plain
    separate = layout.documents == "separate"
    for layers in equal_layers(model, range(model.layers)):
        window, after = model.layer_bounds(layers[0])
        in_encoder = layers[0] < model.encoder_layers
        sides = ["encoder" if in_encoder else "decoder"] if model.encoder_layers else []
        spans = [] if window is None else [f"window of {window} tokens"]
        tokens = lengths.encoder if in_encoder else lengths.decoder
        is_merged = model.merges_attention(layers[0])
        reads = Reads(window, after, context=lengths.encoder * is_merged)
        name, side = ", ".join([*sides, *spans]) or "causal", model.side(layers[0])
        yield _Kind(name, tokens, tokens + reads.context, reads, scores, side, separate)
        if model.encoder_layers == layers[0] > 0 and not is_merged:
            yield _Kind("cross", lengths.decoder, lengths.encoder, Reads(), plain, model)


def _call(
    layout: ResolvedLayout, device: torch.device, kind: _Kind, blocks: bool
) -> dict[str, Any]:
    """Return the arguments with which SdpaAttention calls torch for one sample, without contents.

    In blocks of queries they are those of the last block, which reads all keys, or those of its
    window.
    """
    model, tensor, dtype = kind.side, layout.grid.tensor, DTYPES[layout.precision]
    heads, key_heads = model.heads // tensor, model.kv_heads // tensor
    queries = min(query_block(device), kind.queries) if blocks else kind.queries
    own, last = kind.keys - kind.reads.context, range(kind.queries - queries, kind.queries)
    keys = len(kind.reads.key_range(last, own)) + kind.reads.context
    is_causal = kind.reads.after == 1
    has_bias = kind.scores.bias is not None
    is_masked = has_bias or blocks or not is_causal
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
    if has_bias:
        mask = torch.empty(1, heads, queries, keys, dtype=dtype, device=device)
        mask.requires_grad_()
    elif is_masked:  # of a block, or of padding
        rows = queries if is_causal else 1
        mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device)
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "dropout_p": 0.0 if device.type == "cpu" else model.attention_dropout,
        "is_causal": is_causal and not blocks,
        "enable_gqa": key_heads != heads,
    }
