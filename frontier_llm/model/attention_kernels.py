"""Find the kernels that torch chooses for a model's attention, before the first step.

Without a suitable kernel torch silently computes the whole matrix of queries times keys, which
takes much more time and memory. The choice depends on the GPU, the dtype, the widths and the mask.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from frontier_llm.errors import ConfigError
from frontier_llm.geometry.flops import equal_layers
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.attention import in_blocks
from frontier_llm.model.confined import query_block, repeats_heads
from frontier_llm.model.flex import uses_flex
from frontier_llm.model.transformer import DTYPES

NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}


def attention_kernels(layout: ResolvedLayout, device: torch.device) -> dict[str, str]:
    """Return the kernel of each kind of attention, such as `{"causal": "flash"}`.

    Some memory is allocated on the device for a moment.

    Raises:
        ConfigError: on a GPU, a kind of attention that is not computed in blocks of queries would
            compute whole matrices.
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
