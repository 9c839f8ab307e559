"""Translate the configuration of a run to megatron's TransformerConfig, with a GELU of our own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.resolved import ResolvedLayout

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def transformer_config(
    layout: ResolvedLayout, device: torch.device, *, compiles_functions: bool = False
) -> TransformerConfig:
    """Translate a layout to megatron's configuration.

    On a CPU, fused CUDA kernels are turned off. `compiles_functions` says whether torch.compile may
    make kernels of megatron's fused functions: of gated activations on any device; on a GPU also of
    biases, dropout and residuals.
    """
    model, grid, precision = layout.model, layout.grid, layout.precision
    on_cpu = device.type in ("cpu", "meta")
    fuses = compiles_functions and not on_cpu
    fused_activation = model.activation != "gelu_exact" and (
        (fuses and model.bias) or (compiles_functions and model.gated)
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
        add_qkv_bias=model.qkv_bias,
        normalization=_NORMS[model.norm],
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.zero_centred_norms,
        hidden_dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        softmax_scale=model.softmax_scale,
        tensor_model_parallel_size=grid.tensor,
        # megatron's modules know nothing of the pipeline: each gets its own layers
        pipeline_model_parallel_size=1,
        sequence_parallel=layout.sequence_parallel and grid.tensor > 1,
        params_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        # model/build.py sets the weights, so that they are the same for every layout
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        # the following options need apex or TransformerEngine, or use torch.jit, which does not
        # make a CPU faster
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=fused_activation,
        bias_dropout_fusion=fuses,
        apply_rope_fusion=False,
    )


def side_config(config: TransformerConfig, side: ModelConfig) -> TransformerConfig:
    """Return megatron's configuration of the encoder or the decoder, of its dimensions."""
    return replace(
        config,
        hidden_size=side.hidden,
        num_attention_heads=side.heads,
        num_query_groups=side.kv_heads,
        kv_channels=side.head_dim,
        ffn_hidden_size=side.ffn,
    )


def _activation(model: ModelConfig, fused: bool) -> Callable[[Tensor], Tensor]:
    """Return the activation function, as megatron expects it.

    GELU is computed in the tanh form of GPT-2, unless `gelu_exact` is configured. megatron's fused
    kernel computes the tanh form, but it is selected by F.gelu, which is the exact form.
    """
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": gelu_tanh,
        "gelu_exact": F.gelu,
        "swiglu": F.silu,
        "geglu": gelu_tanh,
    }
    function = functions[model.activation]
    return F.gelu if fused and function is gelu_tanh else function


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form (arXiv:1606.08415, section 2).

    The result may have only one reader, such as a linear layer, because the backward pass
    overwrites the gradient of the result.
    """
    if torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    output: Tensor = _GeluTanh.apply(x)
    return output


class _GeluTanh(torch.autograd.Function):
    """GELU whose backward pass needs no further tensor.

    This matters while weight gradients wait: the output of GELU is then kept as a factor, and
    another tensor of its size would add to the peak memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,), (x,) = grads, ctx.saved_tensors
        return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad)
