"""The only translation from our configuration to megatron's TransformerConfig."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.stages import Piece

# by megatron's blocks; an encoder-decoder's stacks do it themselves (model/layer_stack.py)
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
    config: RunConfig, pieces: Sequence[Piece], precision: str, device: torch.device
) -> TransformerConfig:
    """Translate.

    Args:
        config: the run.
        pieces: the whole pipeline, in the model's order.
        precision: resolved: `fp32`, `bf16` or `fp16`.
        device: on a CPU, fused CUDA kernels and batched point-to-point sends are off.
    """
    model, parallel = config.model, config.parallel
    on_cpu = device.type in ("cpu", "meta")
    interleaved = parallel.chunks > 1
    fused_activation = not on_cpu and model.bias and model.activation != "gelu_exact"
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
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.chunks if interleaved else None,
        pipeline_model_parallel_layout=_layout(pieces) if parallel.pipeline > 1 else None,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        params_dtype=DTYPES[precision],
        pipeline_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        # weights are set by model/initialise.py: the same for every layout
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        # with two stages of several chunks both neighbours are one rank, and a batched exchange
        # would swap activations and gradients without an error
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved and not on_cpu,
        # gloo may still be sending an output when the schedule would free it
        deallocate_pipeline_outputs=not on_cpu,
        # these need apex or TransformerEngine, or fuse by torch.jit, which a CPU does not gain by
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=fused_activation,
        bias_dropout_fusion=not on_cpu,
        apply_rope_fusion=False,
        **_RECOMPUTE[config.recompute if model.kind == "gpt" else "none"],
    )


def _activation(model: ModelConfig, fused: bool) -> Callable[[Tensor], Tensor]:
    """Choose the non-linearity: GELU is GPT-2's, by tanh, also where megatron's kernel fuses it.

    That kernel computes the tanh form but insists on being asked for by the name of the exact one.
    """
    if model.activation == "swiglu":
        return F.silu
    return F.gelu if fused or model.activation == "gelu_exact" else gelu_tanh


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (arXiv:1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


def _layout(pieces: Sequence[Piece]) -> list[list[str]]:
    """Write the pieces as megatron's pipeline_model_parallel_layout."""
    return [
        ["embedding"] * piece.has_embedding
        + ["decoder"] * len(piece.layers)
        + ["loss"] * piece.has_head
        for piece in pieces
    ]
