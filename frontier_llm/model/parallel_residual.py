"""A layer whose attention and feed-forward block read the same residual stream.

    y = x + attention(norm_1(x)) + ffn(norm_2(x))

as in GPT-J and GPT-NeoX (arXiv:2204.06745, section 2.1), where the sequential one has
h = x + attention(norm_1(x)), y = h + ffn(norm_2(h)).
"""

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


class ParallelResidualLayer(TransformerLayer):
    """megatron's layer with its parts in another order; the parts are the same."""

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
            hidden_states: [s, b, hidden]; under sequence parallel this tensor rank's part of s.
            attention_mask: None; causal is the core's own affair.
            context: handed through.
            rotary_pos_emb: angles of rotary positions; None for others.
            attention_bias: None.

        Returns:
            ([s, b, hidden] as it came, the context).
        """
        attended = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
        )
        mapped = self.mlp(self.pre_mlp_layernorm(hidden_states))
        fused = self.config.bias_dropout_fusion
        with self.bias_dropout_add_exec_handler():
            added = self.self_attn_bda(self.training, fused)(
                attended, hidden_states, self.hidden_dropout
            )
            added = self.mlp_bda(self.training, fused)(mapped, added, self.hidden_dropout)
        output = make_viewless_tensor(added, requires_grad=added.requires_grad, keep_graph=True)
        return output, context
