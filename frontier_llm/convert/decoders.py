"""Define the families GPT-2, GPT-NeoX and Llama.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
In both, "our" refers to frontier_llm and "their" to Hugging Face.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_llm.config.model import ModelConfig
from frontier_llm.convert.base_family import (
    Family,
    grouped_mismatch,
    head_width_mismatch,
    query_key_value,
)
from frontier_llm.convert.settings import Setting
from frontier_llm.convert.table import Row, unfold
from frontier_llm.convert.transforms import JoinedHeads, Same, Transform, Transposed

_TANH = {name: "gelu" for name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")}
"""Maps each of their names of the tanh approximation of GELU to ours."""
_PLAIN_ROTARY = {"rope_scaling": None, "rope_parameters.rope_type": "default"}
"""Values of config.json for rotary positions without scaling. The first key is the one of
transformers before version 5, the second the one since."""
_SIZES = (
    Setting("vocabulary", "vocab_size"),
    Setting("data.sequence_length", "max_position_embeddings"),
    Setting("hidden", "hidden_size"),
    Setting("layers", "num_hidden_layers"),
    Setting("heads", "num_attention_heads"),
    Setting("ffn", "intermediate_size"),
    Setting("attention_dropout", "attention_dropout", 0.0),
)
"""Settings whose keys in config.json are the same for GPT-NeoX and Llama."""


def _pair(ours: str, theirs: str, transform: Transform | None = None) -> list[Row]:
    """Return the rows of the weight and the bias of a module.

    Args:
        ours: our name of the module.
        theirs: their name of the module.
        transform: transform of the weight, and of the bias unless it only transposes; None: `Same`.
    """
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
    unused = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
    wants: ClassVar[Mapping[str, Any]] = {
        "kind": "gpt", "positions": "learned", "norm": "layernorm", "activation": "gelu",
        "bias": True, "tied": True, "scaled_attention": True,
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


class GptNeoX(Family):
    """GPT-NeoX and Pythia: rotary positions, biases, parallel or sequential residual branches."""

    name = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    unused = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    wants: ClassVar[Mapping[str, Any]] = {
        "kind": "gpt", "positions": "rotary", "norm": "layernorm",
        "bias": True, "tied": False, "scaled_attention": True,
    }  # fmt: skip
    choices: ClassVar[Mapping[str, Any]] = {
        "residual": ("sequential", "parallel"), "activation": ("gelu", "gelu_exact"),
    }  # fmt: skip
    settings = (
        *_SIZES,
        Setting("activation", "hidden_act", words={"gelu": "gelu_exact", **_TANH}),
        Setting("residual", "use_parallel_residual", words={True: "parallel", False: "sequential"}),
        Setting("norm_epsilon", "layer_norm_eps", 1e-5),
        Setting("dropout", "hidden_dropout", 0.0),
        Setting("rotary_base", ("rope_parameters.rope_theta", "rotary_emb_base"), 10000),
        Setting("rotary_fraction", ("rope_parameters.partial_rotary_factor", "rotary_pct"), 0.25),
    )
    required: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True, "tie_word_embeddings": False, **_PLAIN_ROTARY,
    }  # fmt: skip

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


class Llama(Family):
    """Llama: rotary positions, RMS norm, SwiGLU, no biases, grouped queries."""

    name = "llama"
    architecture = "LlamaForCausalLM"
    unused = (".rotary_emb.inv_freq",)
    wants: ClassVar[Mapping[str, Any]] = {
        "kind": "gpt", "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu",
        "bias": False, "rotary_fraction": 1.0, "dropout": 0.0, "scaled_attention": True,
    }  # fmt: skip
    settings = (
        *_SIZES,
        Setting("kv_heads", "num_key_value_heads", None),
        Setting("head_dim", "head_dim", None),
        Setting("norm_epsilon", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
        Setting("rotary_base", ("rope_parameters.rope_theta", "rope_theta"), 10000),
    )
    required: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, **_PLAIN_ROTARY,
    }  # fmt: skip

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table. Their queries, keys and values are three tensors."""
        ours, theirs = "layers.{n}", "model.layers.{n}"
        layer = [
            Row(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",)),
            Row(
                f"{ours}.attention.qkv.weight",
                tuple(f"{theirs}.self_attn.{letter}_proj.weight" for letter in "qkv"),
                query_key_value(model),
            ),
            Row(f"{ours}.attention.output.weight", (f"{theirs}.self_attn.o_proj.weight",)),
            Row(f"{ours}.ffn_norm.weight", (f"{theirs}.post_attention_layernorm.weight",)),
            *(
                Row(f"{ours}.ffn.{matrix}.weight", (f"{theirs}.mlp.{matrix}_proj.weight",))
                for matrix in ("gate", "up", "down")
            ),
        ]
        return [
            Row("embedding.tokens.weight", ("model.embed_tokens.weight",)),
            *unfold(layer, range(model.layers)),
            Row("final_norm.weight", ("model.norm.weight",)),
            Row("head.weight", ("lm_head.weight",)),
        ]
