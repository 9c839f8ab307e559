"""Define the layer of all models: attention, cross-attention in a decoder, and feed-forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.model.attention import SdpaAttention
from frontier_llm.model.linear import ColumnLinear, RowLinear
from frontier_llm.model.reads import Reads, Scores
from frontier_llm.model.rotary import (
    HeadNorms,
    WidthNorms,
    attention_factor,
    compiled_rotate,
    rms_norm,
    rotate,
)

Output = tuple[Tensor, Tensor | None]
"""The output of a branch, [s, b, hidden], and its bias unless that is added."""


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, on any device.

    With sequence parallelism each tensor-parallel rank normalises only its part of the tokens. The
    attribute `sequence_parallel` of both parameters requests that their gradients are summed.
    """

    def __init__(self, config: TransformerConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.eps = kernels, config.layernorm_epsilon
        self._centred = config.layernorm_zero_centered_gamma
        options = {"dtype": config.params_dtype, "device": torch.get_default_device()}
        self.weight = nn.Parameter(torch.ones(config.hidden_size, **options))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(config.hidden_size, **options))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden]; the result has the dtype of the input."""
        if self.bias is None:
            return rms_norm(self.kernels, x, self.weight, self.eps, centred=self._centred)
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Self-attention, or with `is_cross` the attention to the output of an encoder.

    With `is_merged` one attention reads both (T5Gemma 2, arXiv:2512.14856): the same matrix makes
    keys and values of the encoder's output and of the decoder's tokens, and only the latter keys
    are rotated.

    Shapes have s query tokens, t key tokens, b samples, and on this tensor-parallel rank h heads of
    queries and g heads of keys, of width d. The rows of the fused matrix are ordered by head of
    keys: its queries, its key, its value.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        kernels: Kernels,
        group: dist.ProcessGroup,
        *,
        is_cross: bool = False,
        is_merged: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self._parts = group.size() if config.sequence_parallel else 1
        self._is_merged = is_merged
        self.kernels, self._width, self._factor = kernels, model.head_dim, attention_factor(model)
        tensor = group.size()
        self._key_heads = model.kv_heads // tensor
        query, key = (heads * model.head_dim for heads in (model.heads, model.kv_heads))
        cap, dropout = model.attention_softcap, model.attention_dropout
        scores = Scores(model.softmax_scale, cap, dropout, recompute=recompute)
        options: dict[str, Any] = {"config": config, "skip_bias_add": False, "tp_group": group}
        project = partial(
            ColumnLinear,
            init_method=config.init_method,
            bias=model.qkv_bias,
            gather_output=False,
            **options,
        )
        self.core_attention = SdpaAttention(scores, own_stream=not config.sequence_parallel)
        self.linear_proj = RowLinear(
            query,
            model.hidden,
            init_method=config.output_layer_init_method,
            bias=model.bias,
            input_is_parallel=True,
            **(options | {"skip_bias_add": True}),
        )
        if is_cross or is_merged:
            self.linear_q = project(model.hidden, query)
            self.linear_kv = project(model.encoder.hidden, 2 * key)
        else:
            self.linear_qkv = project(model.hidden, query + 2 * key)
        widths = query // tensor, key // tensor
        make: dict[str, Callable[[], HeadNorms | WidthNorms | None]] = {
            "none": lambda: None,
            "head": lambda: HeadNorms(config, model.head_dim, kernels),
            "width": lambda: WidthNorms(config, widths, kernels, group),
        }
        self.norms = None if is_cross else make[model.qk_norm]()

    def forward(
        self,
        hidden: Tensor,
        reads: Reads,
        bias: Tensor | None = None,
        angles: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Output:
        """Compute attention of [s, b, hidden]; a context is [t, b, the encoder's hidden].

        The bias is that of `Scores`, the angles are those of `rotate`; None without rotation.
        """
        heads = self.heads(hidden, angles, context)
        output: Output = self.linear_proj(self.core_attention(*heads, reads, bias))
        return output

    def heads(
        self, hidden: Tensor, angles: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [s, b, h, d], keys and values [t, b, g, d].

        If attention is merged, the keys of the context come first.
        """
        key_heads, width = self._key_heads, self._width
        if context is None:
            fused = self.linear_qkv(hidden)[0].unflatten(2, (key_heads, -1))
            query, key, value = fused.split([fused.shape[3] - 2 * width, width, width], dim=3)
            query = query.reshape(*query.shape[:2], -1, width)
        else:
            query = self.linear_q(hidden)[0].unflatten(2, (-1, width))
            source = torch.cat([context, hidden]) if self._is_merged else context
            fused = self.linear_kv(source)[0].unflatten(2, (key_heads, -1))
            if self._is_merged and self._parts > 1:  # each rank's part of both, one after another
                sizes, of_ranks = (len(context), len(hidden)), fused.unflatten(0, (self._parts, -1))
                fused = torch.cat([x.flatten(0, 1) for x in of_ranks.split(sizes, dim=1)])
            key, value = fused.chunk(2, dim=3)
        if self.norms is not None:
            query, key = self.norms(query, key)
        if angles is not None:
            function = compiled_rotate() if self.kernels.compiles_functions else rotate
            own = key[-len(query) :] if self._is_merged else key
            query, own = function(query, own, angles, self._factor)
            key = torch.cat([key[: -len(query)], own]) if self._is_merged else own
        return query, key, value


class Layer(nn.Module):
    """A transformer layer: branches whose outputs are added to the residual stream.

    A branch f is attention, in a decoder with an encoder also cross-attention (unless both are
    merged), and the feed-forward block. In the usual layer each adds f(norm(x)) to the stream x. If
    norms are placed at outputs, it adds norm(f(x)) (OLMo 2, arXiv:2501.00656, equations 1 and 2),
    and at both norm'(f(norm(x))) (Gemma 2, arXiv:2408.00118, section 2). If the branches are
    parallel, all of them read the input of the layer (GPT-J and GPT-NeoX, arXiv:2204.06745, section
    2.1).
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        kernels: Kernels,
        group: dist.ProcessGroup,
        *,
        reads_encoder: bool = False,
        is_merged: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.config, self._is_merged = config, is_merged
        places = {"input": (True, False), "output": (False, True), "both": (True, True)}
        self._norms_input, self._norms_output = places[model.norm_placement]
        self._in_parallel = {"sequential": False, "parallel": True}[model.residual]
        attention = partial(Attention, config, model, kernels, group, recompute=recompute)
        count = self._norms_input + self._norms_output
        norms = [[Norm(config, kernels) for _ in range(count)] for _ in range(2 + reads_encoder)]
        self.attention_norms = nn.ModuleList(norms[0])
        self.self_attention = attention(is_merged=is_merged)
        if reads_encoder:
            self.cross_attention_norms = nn.ModuleList(norms[1])
            self.cross_attention = attention(is_cross=True)
        self.mlp_norms = nn.ModuleList(norms[-1])
        linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        self.mlp = MLP(config, linears, tp_group=group)
        self._reads_encoder = reads_encoder

    def forward(
        self,
        hidden: Tensor,
        reads: Reads,
        bias: Tensor | None = None,
        angles: Tensor | None = None,
        context: Tensor | None = None,
        context_reads: Reads | None = None,
    ) -> Tensor:
        """Run the layer on [s tokens, b samples, hidden].

        A decoder of an encoder-decoder reads the context, [t, b, the encoder's hidden]. With
        sequence parallelism the tokens are those of this tensor-parallel rank.
        """
        attend = partial(self.self_attention, reads=reads, bias=bias, angles=angles)
        if self._is_merged:
            attend = partial(attend, context=context)
        total = self._add(self.attention_norms, attend, hidden, hidden)
        if self._reads_encoder:
            cross = partial(self.cross_attention, reads=context_reads, context=context)
            source = hidden if self._in_parallel else total
            total = self._add(self.cross_attention_norms, cross, source, total)
        source = hidden if self._in_parallel else total
        return self._add(self.mlp_norms, self.mlp, source, total)

    def _add(
        self,
        norms: nn.ModuleList,
        branch: Callable[[Tensor], Output],
        source: Tensor,
        total: Tensor,
    ) -> Tensor:
        """Add the output of a branch, with dropout, to the residual stream."""
        output = branch(norms[0](source) if self._norms_input else source)
        if self._norms_output:
            result, bias = output
            output = norms[-1](result if bias is None else result + bias), None
        add = get_bias_dropout_add(self.training, self.config.bias_dropout_fusion)
        added: Tensor = add(output, total, self.config.hidden_dropout)
        return added
