"""Translate the configuration of a run to megatron's TransformerConfig."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout

# Options of megatron for each value of the configured recomputation. They apply to GPTs only;
# model/layer_stack.py implements recomputation for encoder-decoders.
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def transformer_config(
    layout: ResolvedLayout, device: torch.device, *, compiles_activation: bool = False
) -> TransformerConfig:
    """Translate a layout to megatron's configuration.

    Args:
        layout: model, precision and grid of ranks of the run.
        device: device of this rank. On a CPU, fused CUDA kernels and batched point-to-point
            messages are turned off.
        compiles_activation: whether a gated activation is compiled by itself, on any device.
    """
    model, grid, precision = layout.model, layout.grid, layout.precision
    on_cpu = device.type in ("cpu", "meta")
    interleaved = layout.virtual_stages > 1
    fused_activation = model.activation != "gelu_exact" and (
        (not on_cpu and model.bias) or (compiles_activation and model.gated)
    )
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=model.gated,
        activation_func=_activation(model, fused_activation),
        add_bias_linear=model.bias,
        normalization="LayerNorm" if model.norm == "layernorm" else "RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        hidden_dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        softmax_scale=None if model.scaled_attention else 1.0,
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if interleaved else None,
        pipeline_model_parallel_layout=(
            _pipeline_layout(layout.model_chunks) if grid.pipeline > 1 else None
        ),
        sequence_parallel=layout.sequence_parallel and grid.tensor > 1,
        params_dtype=DTYPES[precision],
        pipeline_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        # model/initialise.py sets the weights, so that they are the same for every layout
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        **_exchanges(on_cpu, interleaved),
        # the following options need apex or TransformerEngine, or use torch.jit, which does not
        # make a CPU faster
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=fused_activation,
        bias_dropout_fusion=not on_cpu,
        apply_rope_fusion=False,
        **_RECOMPUTE[layout.recompute if model.kind == "gpt" else "none"],
    )


def _exchanges(on_cpu: bool, interleaved: bool) -> dict[str, bool]:
    """Return megatron's options for the exchange of activations between pipeline stages."""
    return {
        # With two pipeline ranks, the previous and the next neighbour of a rank are the same rank.
        # If stages are interleaved, a batched exchange would silently swap activations and
        # gradients.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved and not on_cpu,
        # only needed by old torch versions; it would make the host wait for the whole device
        "batch_p2p_sync": False,
        # gloo may still be sending an output when the schedule wants to free it
        "deallocate_pipeline_outputs": not on_cpu,
    }


def _activation(model: ModelConfig, fused: bool) -> Callable[[Tensor], Tensor]:
    """Return the activation function, as megatron expects it.

    GELU is computed in the tanh form of GPT-2, unless `gelu_exact` is configured. megatron's fused
    kernel computes the tanh form, but it is selected by F.gelu, which is the exact form.
    """
    if model.activation == "swiglu":
        return F.silu
    return F.gelu if fused or model.activation == "gelu_exact" else gelu_tanh


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form (arXiv:1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


def _pipeline_layout(chunks: Sequence[ModelChunk]) -> list[list[str]]:
    """Return the model chunks in the format of megatron's `pipeline_model_parallel_layout`."""
    return [
        ["embedding"] * chunk.has_embedding
        + ["decoder"] * len(chunk.layers)
        + ["loss"] * chunk.has_head
        for chunk in chunks
    ]
