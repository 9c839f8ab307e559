"""Replacements of megatron's layer modules: linear layers, norm, parallel residual layer."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from frontier_llm.device.kernels import Kernels


class ColumnLinear(ColumnParallelLinear):
    """megatron's linear layer whose output features are split over tensor ranks.

    On a CPU without tensor parallelism, the bias is added inside the matrix product. megatron
    instead returns the bias, so that a fused kernel of the next operation adds it. A CPU has no
    such kernels, and adding the bias separately would be another pass over the output.
    """

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply by the weight.

        Args:
            input_: [..., in].
            weight: used instead of the layer's weight, if given.
            runtime_gather_output: whether every rank gets all output features.

        Returns:
            ([..., out / tensor ranks], the bias if the caller must add it, else None).
        """
        if fuses_bias(self, input_):
            return F.linear(input_, self.weight if weight is None else weight, self.bias), None
        return super().forward(input_, weight, runtime_gather_output)


class RowLinear(RowParallelLinear):
    """megatron's linear layer whose input features are split over tensor ranks.

    The bias is added as in `ColumnLinear`.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply by the weight.

        Args:
            input_: [..., in / tensor ranks].

        Returns:
            ([..., out], the bias if the caller must add it, else None).
        """
        if fuses_bias(self, input_):
            return F.linear(input_, self.weight, self.bias), None
        return super().forward(input_)


def fuses_bias(layer: ColumnParallelLinear | RowParallelLinear, input_: Tensor) -> bool:
    """Whether the layer adds its bias inside the product: on a CPU, without tensor parallelism."""
    return input_.is_cpu and layer.tp_group.size() == 1


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim, for megatron's layers, on any device.

    Under sequence parallelism each tensor rank normalises only its part of the tokens, so the
    gradient of weight and bias is the sum of all tensor ranks' gradients. The attribute
    `sequence_parallel` of the parameters marks gradients that must be summed.
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

    as in GPT-J and GPT-NeoX (arXiv:2204.06745, section 2.1). The sequential layer computes
    h = x + attention(norm_1(x)), y = h + ffn(norm_2(h)). The submodules are megatron's.
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
        """Run the layer.

        Args:
            hidden_states: [s tokens, b samples, hidden]; under sequence parallelism only this
                tensor rank's tokens.
            attention_mask: must be None: the attention core applies the causal mask itself.
            context: returned unchanged.
            rotary_pos_emb: angles of rotary positions; None for other positions.
            attention_bias: must be None: there are no relative positions.

        Returns:
            ([s, b, hidden] with the same s, the context).
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
            # "bda": add the bias, apply dropout, add the residual
            sum_ = self.self_attn_bda(self.training, fused)(
                attention, hidden_states, self.hidden_dropout
            )
            sum_ = self.mlp_bda(self.training, fused)(feed_forward, sum_, self.hidden_dropout)
        output = make_viewless_tensor(sum_, requires_grad=sum_.requires_grad, keep_graph=True)
        return output, context
