"""Specify megatron's transformer layers: which class is used for each submodule of a layer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.model.attention import SdpaAttention
from frontier_llm.model.confined import Scores
from frontier_llm.model.layer_modules import Norm, OutputNormLayer, ParallelResidualLayer
from frontier_llm.model.linear import ColumnLinear, RowLinear
from frontier_llm.model.rotary import RotarySelfAttention


def decoder_block(
    layers: Sequence[int], model: ModelConfig, kernels: Kernels
) -> TransformerBlockSubmodules:
    """Specify causal layers. megatron adds the final norm after the model's last layer."""
    return TransformerBlockSubmodules(
        layer_specs=[_gpt_layer(number, model, kernels) for number in layers],
        layer_norm=ModuleSpec(module=Norm, params=_norm_parameters(kernels)),
    )


def _gpt_layer(number: int, model: ModelConfig, kernels: Kernels) -> ModuleSpec:
    scores = Scores(window=model.layer_window(number), cap=model.attention_softcap)
    layer = layer_spec(model, kernels, causal=True, scores=scores)
    layer.module = {
        "sequential": {"input": layer.module, "output": OutputNormLayer},
        "parallel": {"input": ParallelResidualLayer},
    }[model.residual][model.norm_placement]
    return layer


def layer_spec(
    model: ModelConfig,
    kernels: Kernels,
    *,
    causal: bool,
    reads_encoder: bool = False,
    recompute: bool = False,
    scores: Scores | None = None,
) -> ModuleSpec:
    """Specify one layer; with `recompute` attention is computed again in the backward pass."""
    norm = ModuleSpec(module=Norm, params=_norm_parameters(kernels))
    core = partial(SdpaAttention, recompute=recompute, scores=scores)
    mask = AttnMaskType.causal if causal else AttnMaskType.padding
    # "bda" stands for megatron's function that adds bias, dropout and residual
    submodules: dict[str, Any] = {
        "input_layernorm": norm,
        "self_attention": ModuleSpec(
            module=RotarySelfAttention,
            params={
                "attn_mask_type": mask,
                "model": model,
                "kernels": kernels,
            },
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnLinear,
                core_attention=core,
                linear_proj=RowLinear,
            ),
        ),
        "self_attn_bda": get_bias_dropout_add,
        "pre_mlp_layernorm": norm,
        "mlp": ModuleSpec(
            module=MLP,
            submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear),
        ),
        "mlp_bda": get_bias_dropout_add,
    }
    if reads_encoder:
        submodules |= {
            "pre_cross_attn_layernorm": norm,
            "cross_attention": _cross_attention(core),
            "cross_attn_bda": get_bias_dropout_add,
        }
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**submodules))


def _cross_attention(core: partial[SdpaAttention]) -> ModuleSpec:
    return ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnLinear,
            linear_kv=ColumnLinear,
            core_attention=core,
            linear_proj=RowLinear,
        ),
    )


def _norm_parameters(kernels: Kernels) -> dict[str, Any]:
    """Return the arguments of `Norm` that megatron does not pass by itself."""
    return {"kernels": kernels}
