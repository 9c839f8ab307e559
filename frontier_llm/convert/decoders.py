"""Define the families GPT-2 and GPT-NeoX.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
In both, "our" refers to frontier_llm and "their" to Hugging Face.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_llm.config.model import ModelConfig
from frontier_llm.convert.base_family import (
    PLAIN,
    SIZES,
    Family,
    Setting,
    grouped_mismatch,
    head_width_mismatch,
    query_key_value,
)
from frontier_llm.convert.rotary_settings import RotaryFamily
from frontier_llm.convert.table import JoinedHeads, Row, Same, Transform, Transposed, unfold

_TANH = {name: "gelu" for name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")}
"""Maps each of their names of the tanh approximation of GELU to ours."""


def _pair(ours: str, theirs: str, transform: Transform | None = None) -> list[Row]:
    """Return the rows of the weight and the bias of a module; a bias is not transposed."""
    transform = transform or Same()
    bias_transform = Same() if isinstance(transform, Transposed) else transform
    return [
        Row(f"{ours}.weight", (f"{theirs}.weight",), transform),
        Row(f"{ours}.bias", (f"{theirs}.bias",), bias_transform),
    ]


class Gpt2(Family):
    """GPT-2: learned positions, biases, tanh-approximated GELU."""

    name = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    unused = (".attn.bias", ".attn.masked_bias")
    copies: ClassVar[Mapping[str, str]] = {"lm_head.weight": "transformer.wte.weight"}
    wants: ClassVar[Mapping[str, Any]] = {
        **PLAIN, "kind": "gpt", "positions": "learned", "norm": "layernorm", "activation": "gelu",
        "bias": True, "qkv_bias": True, "rotary_scaling": "none", "tied": True,
    }  # fmt: skip
    settings = (
        Setting("vocabulary", "vocab_size"),
        Setting("data.sequence_length", "n_positions"),
        Setting("hidden", "n_embd"),
        Setting("layers", "n_layer"),
        Setting("heads", "n_head"),
        Setting("ffn", "n_inner", None),
        Setting("activation", "activation_function", words=_TANH),
        Setting("norm_epsilon", "layer_norm_epsilon", 1e-5),
        Setting("dropout", ("resid_pdrop", "embd_pdrop"), 0.1),
        Setting("attention_dropout", "attn_pdrop", 0.1),
    )
    required: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table. GPT-2 transposes its weights and joins queries, keys and values."""
        ours, theirs = "layers.{n}", "transformer.h.{n}"
        fused = JoinedHeads(query_key_value(model))
        layer = [
            *_pair(f"{ours}.attention_norm", f"{theirs}.ln_1"),
            *_pair(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", fused),
            *_pair(f"{ours}.attention.output", f"{theirs}.attn.c_proj", Transposed()),
            *_pair(f"{ours}.ffn_norm", f"{theirs}.ln_2"),
            *_pair(f"{ours}.ffn.up", f"{theirs}.mlp.c_fc", Transposed()),
            *_pair(f"{ours}.ffn.down", f"{theirs}.mlp.c_proj", Transposed()),
        ]
        return [
            Row("embedding.tokens.weight", ("transformer.wte.weight",)),
            Row("embedding.positions.weight", ("transformer.wpe.weight",)),
            *unfold(layer, range(model.layers)),
            *_pair("final_norm", "transformer.ln_f"),
        ]

    def more_mismatches(self, model: ModelConfig) -> list[str]:
        """Refuse grouped queries and head widths other than hidden / heads; GPT-2 has neither."""
        return grouped_mismatch(model) + head_width_mismatch(model)


class GptNeoX(RotaryFamily):
    """GPT-NeoX and Pythia: rotary positions, biases, parallel or sequential residual branches."""

    name = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    unused = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    wants: ClassVar[Mapping[str, Any]] = {
        **PLAIN, "kind": "gpt", "positions": "rotary", "norm": "layernorm",
        "bias": True, "qkv_bias": True, "tied": False,
    }  # fmt: skip
    choices: ClassVar[Mapping[str, Any]] = {
        "residual": ("sequential", "parallel"), "activation": ("gelu", "gelu_exact"),
    }  # fmt: skip
    settings = (
        *SIZES,
        Setting("activation", "hidden_act", words={"gelu": "gelu_exact", **_TANH}),
        Setting("residual", "use_parallel_residual", words={True: "parallel", False: "sequential"}),
        Setting("norm_epsilon", "layer_norm_eps", 1e-5),
        Setting("dropout", "hidden_dropout", 0.0),
        Setting("rotary_fraction", ("rope_parameters.partial_rotary_factor", "rotary_pct"), 0.25),
    )
    required: ClassVar[Mapping[str, Any]] = {"attention_bias": True, "tie_word_embeddings": False}
    base_keys = ("rotary_emb_base",)

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table. Their fused projection of attention has the same rows as ours."""
        ours, theirs = "layers.{n}", "gpt_neox.layers.{n}"
        layer = [
            *_pair(f"{ours}.attention_norm", f"{theirs}.input_layernorm"),
            *_pair(f"{ours}.attention.qkv", f"{theirs}.attention.query_key_value"),
            *_pair(f"{ours}.attention.output", f"{theirs}.attention.dense"),
            *_pair(f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm"),
            *_pair(f"{ours}.ffn.up", f"{theirs}.mlp.dense_h_to_4h"),
            *_pair(f"{ours}.ffn.down", f"{theirs}.mlp.dense_4h_to_h"),
        ]
        return [
            Row("embedding.tokens.weight", ("gpt_neox.embed_in.weight",)),
            *unfold(layer, range(model.layers)),
            *_pair("final_norm", "gpt_neox.final_layer_norm"),
            Row("head.weight", ("embed_out.weight",)),
        ]

    def more_mismatches(self, model: ModelConfig) -> list[str]:
        """Refuse grouped queries and head widths other than hidden / heads, as for GPT-2."""
        return grouped_mismatch(model) + head_width_mismatch(model)
