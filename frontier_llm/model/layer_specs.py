"""Specify megatron's transformer layers, and define the norms and layers that replace some of them.

The layers differ in what the feed-forward block reads (`ParallelResidualLayer`) and in what the
norms normalise (`OutputNormLayer`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
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
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.model.attention import SdpaAttention
from frontier_llm.model.confined import Scores
from frontier_llm.model.linear import ColumnLinear, RowLinear
from frontier_llm.model.rotary import RotarySelfAttention


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, for megatron's layers, on any device.

    With sequence parallelism each tensor-parallel rank normalises only its part of the tokens. The
    attribute `sequence_parallel` of both parameters requests that their gradients are summed.
    """

    def __init__(
        self, config: Any, hidden_size: int, kernels: Kernels, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.kernels, self.eps = kernels, eps
        options = {"dtype": config.params_dtype, "device": torch.get_default_device()}
        self.weight = nn.Parameter(torch.ones(hidden_size, **options))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, **options))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden]; the result has the dtype of the input."""
        if self.bias is None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)


class ParallelResidualLayer(TransformerLayer):
    """A layer whose attention and feed-forward block read the same residual stream.

        y = x + attention(norm_1(x)) + ffn(norm_2(x))

    This is the layer of GPT-J and GPT-NeoX (arXiv:2204.06745, section 2.1). The usual, sequential
    layer computes h = x + attention(norm_1(x)) and y = h + ffn(norm_2(h)). Both have the same
    submodules of megatron.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer on [s tokens, b samples, hidden]; the context is returned unchanged.

        With sequence parallelism the tokens are those of this tensor-parallel rank. The mask must
        be None, because the attention core applies the causal mask itself.
        """
        attention = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
        )
        feed_forward = self.mlp(self.pre_mlp_layernorm(hidden_states))
        fused = self.config.bias_dropout_fusion
        with self.bias_dropout_add_exec_handler():
            # megatron's "bda" functions add the bias, apply dropout and add the residual
            residual = self.self_attn_bda(self.training, fused)(
                attention, hidden_states, self.hidden_dropout
            )
            total = self.mlp_bda(self.training, fused)(feed_forward, residual, self.hidden_dropout)
        output = make_viewless_tensor(total, requires_grad=total.requires_grad, keep_graph=True)
        return output, context


class OutputNormLayer(TransformerLayer):
    """A layer that normalises the output of each branch before it is added to the residual stream.

        h = x + norm_1(attention(x))
        y = h + norm_2(ffn(h))

    This is the layer of OLMo 2 (arXiv:2501.00656, equations 1 and 2). It has the submodules of
    megatron's usual layer, so the norms have the same names.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer; arguments and result are those of `ParallelResidualLayer.forward`."""
        attention = self.self_attention(
            hidden_states,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
        )
        residual = self._add(self.input_layernorm, self.self_attn_bda, attention, hidden_states)
        feed_forward = self.mlp(residual)
        output = self._add(self.pre_mlp_layernorm, self.mlp_bda, feed_forward, residual)
        return make_viewless_tensor(output, output.requires_grad, keep_graph=True), context

    def _add(
        self, norm: Norm, add: Any, branch: tuple[Tensor, Tensor | None], residual: Tensor
    ) -> Tensor:
        """Add the normalised output of a branch, with dropout, to the residual stream.

        `add` is megatron's "bda" function. A branch is its output, [s, b, hidden], and its bias,
        unless that is added.
        """
        output, bias = branch
        normalised = norm(output if bias is None else output + bias)
        with self.bias_dropout_add_exec_handler():
            total: Tensor = add(self.training, self.config.bias_dropout_fusion)(
                (normalised, None), residual, self.hidden_dropout
            )
        return total


def decoder_block(
    layers: Sequence[int], model: ModelConfig, kernels: Kernels
) -> TransformerBlockSubmodules:
    """Specify causal layers. megatron adds the final norm after the model's last layer."""
    return TransformerBlockSubmodules(
        layer_specs=[_gpt_layer(number, model, kernels) for number in layers],
        layer_norm=ModuleSpec(module=Norm, params={"kernels": kernels}),
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
    norm = ModuleSpec(module=Norm, params={"kernels": kernels})
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
