"""Which module stands in which slot of megatron's transformer block."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from frontier_llm.device.kernels import Kernels
from frontier_llm.model.attention import SdpaAttention
from frontier_llm.model.norm import Norm


def decoder_block(layers: int, kernels: Kernels) -> TransformerBlockSubmodules:
    """Specify a stack of causal layers and the norm that follows the last of all.

    Args:
        layers: of this piece of the pipeline.
        kernels: implementation of the norms.
    """
    norm = ModuleSpec(module=Norm, params={"kernels": kernels})
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=SdpaAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    feed_forward = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
