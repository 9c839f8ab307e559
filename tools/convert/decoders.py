"""The tables of GPT-2, GPT-NeoX and Llama."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from tools.convert.family import (
    Family,
    Values,
    grouped_mismatch,
    head_width_mismatch,
    query_key_value,
)
from tools.convert.table import Row, unfold
from tools.convert.transforms import JoinedHeads, Same, Transform, Transposed


def _pair(ours: str, theirs: str, transform: Transform | None = None) -> list[Row]:
    """Write the rows of a weight and a bias."""
    transform = transform or Same()
    bias = Same() if isinstance(transform, Transposed) else transform
    return [
        Row(f"{ours}.weight", (f"{theirs}.weight",), transform),
        Row(f"{ours}.bias", (f"{theirs}.bias",), bias),
    ]


class Gpt2(Family):
    """GPT-2: learned positions, biases, GELU by tanh."""

    name = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    unused = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
    wants: ClassVar[Mapping[str, Any]] = {
        "kind": "gpt", "positions": "learned", "norm": "layernorm", "activation": "gelu",
        "bias": True, "tied": True, "scaled_attention": True,
    }  # fmt: skip
    required: ClassVar[Mapping[str, Any]] = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """GPT-2's Conv1D keeps weights transposed, and queries, keys and values in one."""
        h, p = "layers.{n}", "transformer.h.{n}"
        fused = JoinedHeads(query_key_value(model))
        layer = [
            *_pair(f"{h}.attention_norm", f"{p}.ln_1"),
            *_pair(f"{h}.attention.qkv", f"{p}.attn.c_attn", fused),
            *_pair(f"{h}.attention.output", f"{p}.attn.c_proj", Transposed()),
            *_pair(f"{h}.ffn_norm", f"{p}.ln_2"),
            *_pair(f"{h}.ffn.up", f"{p}.mlp.c_fc", Transposed()),
            *_pair(f"{h}.ffn.down", f"{p}.mlp.c_proj", Transposed()),
        ]
        return [
            Row("embedding.tokens.weight", ("transformer.wte.weight",)),
            Row("embedding.positions.weight", ("transformer.wpe.weight",)),
            *unfold(layer, range(model.layers)),
            *_pair("final_norm", "transformer.ln_f"),
        ]

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate."""
        model = config.model
        return {
            "vocab_size": model.vocabulary,
            "n_positions": config.data.sequence_length,
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": model.norm_epsilon,
            "embd_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
            "attn_pdrop": model.attention_dropout,
            "tie_word_embeddings": True,
        }

    def to_ours(self, theirs: Values) -> Values:
        """Translate."""
        return {
            "vocabulary": theirs["vocab_size"],
            "hidden": theirs["n_embd"],
            "layers": theirs["n_layer"],
            "heads": theirs["n_head"],
            "ffn": theirs.get("n_inner"),
            "norm_epsilon": theirs.get("layer_norm_epsilon", 1e-5),
            "dropout": theirs.get("resid_pdrop", 0.1),
            "attention_dropout": theirs.get("attn_pdrop", 0.1),
            "data.sequence_length": theirs["n_positions"],
        }

    def more_mismatches(self, model: ModelConfig) -> list[str]:
        """GPT-2 has neither grouped nor narrow heads."""
        return grouped_mismatch(model) + head_width_mismatch(model)


class GptNeoX(Family):
    """GPT-NeoX, and so Pythia: rotary positions, biases, a parallel or a sequential residual."""

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
    required: ClassVar[Mapping[str, Any]] = {
        "hidden_act": ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_scaling": None,
    }

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Its fused projection is laid out as ours."""
        h, p = "layers.{n}", "gpt_neox.layers.{n}"
        layer = [
            *_pair(f"{h}.attention_norm", f"{p}.input_layernorm"),
            *_pair(f"{h}.attention.qkv", f"{p}.attention.query_key_value"),
            *_pair(f"{h}.attention.output", f"{p}.attention.dense"),
            *_pair(f"{h}.ffn_norm", f"{p}.post_attention_layernorm"),
            *_pair(f"{h}.ffn.up", f"{p}.mlp.dense_h_to_4h"),
            *_pair(f"{h}.ffn.down", f"{p}.mlp.dense_4h_to_h"),
        ]
        return [
            Row("embedding.tokens.weight", ("gpt_neox.embed_in.weight",)),
            *unfold(layer, range(model.layers)),
            *_pair("final_norm", "gpt_neox.final_layer_norm"),
            Row("head.weight", ("embed_out.weight",)),
        ]

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate."""
        model = config.model
        return {
            "vocab_size": model.vocabulary,
            "max_position_embeddings": config.data.sequence_length,
            "hidden_size": model.hidden,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "intermediate_size": model.ffn,
            "hidden_act": "gelu" if model.activation == "gelu_exact" else "gelu_pytorch_tanh",
            "use_parallel_residual": model.residual == "parallel",
            "attention_bias": True,
            "layer_norm_eps": model.norm_epsilon,
            "hidden_dropout": model.dropout,
            "attention_dropout": model.attention_dropout,
            "tie_word_embeddings": False,
            **_rotary(model, "rotary_pct"),
        }

    def to_ours(self, theirs: Values) -> Values:
        """Translate."""
        return {
            "vocabulary": theirs["vocab_size"],
            "hidden": theirs["hidden_size"],
            "layers": theirs["num_hidden_layers"],
            "heads": theirs["num_attention_heads"],
            "ffn": theirs["intermediate_size"],
            "activation": "gelu_exact" if theirs.get("hidden_act", "gelu") == "gelu" else "gelu",
            "residual": "parallel" if theirs.get("use_parallel_residual", True) else "sequential",
            "norm_epsilon": theirs.get("layer_norm_eps", 1e-5),
            "dropout": theirs.get("hidden_dropout", 0.0),
            "attention_dropout": theirs.get("attention_dropout", 0.0),
            "rotary_base": _rotary_setting(theirs, "rope_theta", "rotary_emb_base", 10000),
            "rotary_fraction": _rotary_setting(theirs, "partial_rotary_factor", "rotary_pct", 0.25),
            "data.sequence_length": theirs["max_position_embeddings"],
        }

    def more_mismatches(self, model: ModelConfig) -> list[str]:
        """GPT-NeoX has neither grouped nor narrow heads."""
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
    required: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
    }  # fmt: skip

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Its three projections are apart."""
        h, p = "layers.{n}", "model.layers.{n}"
        layer = [
            Row(f"{h}.attention_norm.weight", (f"{p}.input_layernorm.weight",)),
            Row(
                f"{h}.attention.qkv.weight",
                tuple(f"{p}.self_attn.{x}_proj.weight" for x in "qkv"),
                query_key_value(model),
            ),
            Row(f"{h}.attention.output.weight", (f"{p}.self_attn.o_proj.weight",)),
            Row(f"{h}.ffn_norm.weight", (f"{p}.post_attention_layernorm.weight",)),
            *(
                Row(f"{h}.ffn.{x}.weight", (f"{p}.mlp.{x}_proj.weight",))
                for x in ("gate", "up", "down")
            ),
        ]
        return [
            Row("embedding.tokens.weight", ("model.embed_tokens.weight",)),
            *unfold(layer, range(model.layers)),
            Row("final_norm.weight", ("model.norm.weight",)),
            Row("head.weight", ("lm_head.weight",)),
        ]

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate."""
        model = config.model
        return {
            "vocab_size": model.vocabulary,
            "max_position_embeddings": config.data.sequence_length,
            "hidden_size": model.hidden,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "intermediate_size": model.ffn,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": model.norm_epsilon,
            "attention_dropout": model.attention_dropout,
            "tie_word_embeddings": model.tied,
            **_rotary(model),
        }

    def to_ours(self, theirs: Values) -> Values:
        """Translate."""
        return {
            "vocabulary": theirs["vocab_size"],
            "hidden": theirs["hidden_size"],
            "layers": theirs["num_hidden_layers"],
            "heads": theirs["num_attention_heads"],
            "kv_heads": theirs.get("num_key_value_heads"),
            "head_dim": theirs.get("head_dim"),
            "ffn": theirs["intermediate_size"],
            "norm_epsilon": theirs.get("rms_norm_eps", 1e-6),
            "attention_dropout": theirs.get("attention_dropout", 0.0),
            "tied": theirs.get("tie_word_embeddings", False),
            "rotary_base": _rotary_setting(theirs, "rope_theta", "rope_theta", 10000),
            "data.sequence_length": theirs["max_position_embeddings"],
        }


def _rotary(model: ModelConfig, fraction_key: str | None = None) -> Values:
    """Write rotary settings in both of their forms: flat, and as of transformers 5."""
    base: Values = {"rope_theta": float(model.rotary_base)}
    nested: Values = {"rope_type": "default", **base}
    if fraction_key is None:
        return {**base, "rope_parameters": nested}
    nested["partial_rotary_factor"] = model.rotary_fraction
    flat = {"rotary_emb_base": model.rotary_base, fraction_key: model.rotary_fraction}
    return {**flat, "rope_parameters": nested}


def _rotary_setting(theirs: Values, key: str, old_key: str, default: float) -> Any:
    """Read a rotary setting in either form, as an integer where it is one."""
    nested = theirs.get("rope_parameters") or {}
    value: Any = nested.get(key, theirs.get(old_key, default))
    return int(value) if key == "rope_theta" else float(value)
