"""The kernels that torch chooses for a model's attention, found before the first step.

Without a suitable kernel torch silently computes the whole matrix of queries times keys, which
takes much more time and memory. The choice depends on the GPU, the dtype, the widths and the mask.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from frontier_llm.errors import ConfigError
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.attention import DEVICE_QUERY_BLOCK, QUERY_BLOCK
from frontier_llm.model.transformer import DTYPES

NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}


def attention_kernels(layout: ResolvedLayout, device: torch.device) -> dict[str, str]:
    """Return the kernel of each kind of attention, such as `{"causal": "flash"}`.

    Args:
        layout: of the run.
        device: a GPU or the CPU. Some memory is allocated on it for a moment.

    Raises:
        ConfigError: on a GPU, a kind of attention that is not computed in blocks of queries would
            compute whole matrices.
    """
    kernels = {}
    for kind, call, in_blocks in _kinds(layout, device):
        kernel = NAMES[SDPBackend(torch._fused_sdp_choice(**call))]
        if kernel == "math" and not in_blocks and device.type != "cpu":
            raise ConfigError(
                "model.head_dim",
                f"{layout.model.head_dim} in {layout.precision}, for which torch has no attention "
                f"kernel on {torch.cuda.get_device_name(device)}",
                "a width and a precision with a kernel that does not store queries times keys",
                "set precision=bf16 or fp16, and a width that is a multiple of 8 and at most 256",
            )
        kernels[kind] = f"{kernel}, in blocks of queries" if in_blocks else kernel
    return kernels


def _kinds(
    layout: ResolvedLayout, device: torch.device
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield the kinds of attention of a model, as SdpaAttention calls them.

    Yields:
        (name, arguments for torch, whether attention is computed in blocks of queries). The query
        is [1, heads of this rank, tokens or block, head width].
    """
    model, lengths, on_cpu = layout.model, layout.lengths, device.type == "cpu"
    block = QUERY_BLOCK if on_cpu else DEVICE_QUERY_BLOCK
    dropout = model.attention_dropout
    if model.kind == "gpt":
        in_blocks = on_cpu and dropout > 0
        length = min(block, lengths.decoder) if in_blocks else lengths.decoder
        mask = torch.ones(length, length, dtype=torch.bool, device=device) if in_blocks else None
        yield "causal", _call(layout, device, length, length, mask, causal=not in_blocks), in_blocks
        return
    for name, length in (("encoder", lengths.encoder), ("decoder", lengths.decoder)):
        queries, heads = min(block, length), model.heads // layout.grid.tensor
        bias = torch.empty(
            1, heads, queries, length, dtype=DTYPES[layout.precision], device=device
        ).requires_grad_()
        yield name, _call(layout, device, queries, length, bias, causal=False), True
    padding = torch.ones(1, 1, 1, lengths.encoder, dtype=torch.bool, device=device)
    call = _call(layout, device, lengths.decoder, lengths.encoder, padding, causal=False)
    yield "cross", call, on_cpu and dropout > 0


def _call(
    layout: ResolvedLayout,
    device: torch.device,
    queries: int,
    keys: int,
    mask: torch.Tensor | None,
    *,
    causal: bool,
) -> dict[str, Any]:
    """Return the arguments of scaled_dot_product_attention for one sample, without contents."""
    model, tensor = layout.model, layout.grid.tensor
    heads, key_heads = model.heads // tensor, model.kv_heads // tensor
    if device.type == "cpu":
        key_heads = heads  # SdpaAttention repeats them
    query, key, value = (
        # as megatron's layers make them: [tokens, samples, heads, width], permuted
        torch.empty(
            tokens, 1, count, model.head_dim, dtype=DTYPES[layout.precision], device=device
        ).requires_grad_().permute(1, 2, 0, 3)
        for tokens, count in ((queries, heads), (keys, key_heads), (keys, key_heads))
    )  # fmt: skip
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "dropout_p": 0.0 if device.type == "cpu" else model.attention_dropout,
        "is_causal": causal,
        "enable_gqa": key_heads != heads,
    }
