"""Define Llama and the families that differ from it in norms, biases or windows.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
In both, "our" refers to frontier_llm and "their" to Hugging Face.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_llm.config.model import ModelConfig
from frontier_llm.convert.base_family import (
    PLAIN,
    SIZES,
    Family,
    Setting,
    Values,
    head_width_mismatch,
    query_key_value,
)
from frontier_llm.convert.rotary_settings import RotaryFamily
from frontier_llm.convert.table import Row, unfold
from frontier_llm.errors import DataError


class LlamaLike(RotaryFamily, ABC):
    """Rotary positions, RMS norm, SwiGLU, grouped queries; no biases but those of attention."""

    unused = (".rotary_emb.inv_freq",)
    copies: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    wants: ClassVar[Mapping[str, Any]] = {
        **PLAIN, "kind": "gpt", "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu",
        "bias": False, "qkv_bias": False, "rotary_fraction": 1.0, "dropout": 0.0,
    }  # fmt: skip
    required: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    norms: ClassVar[tuple[str, str]] = ("input_layernorm", "post_attention_layernorm")
    """Their names of the norms of attention and of the feed-forward block."""

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table. Their queries, keys and values are three tensors."""
        ours, theirs = "layers.{n}", "model.layers.{n}"
        attention, feed_forward = self.norms
        projections = {
            kind: tuple(f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv")
            for kind in ("weight", "bias")
        }
        layer = [
            Row(f"{ours}.attention_norm.weight", (f"{theirs}.{attention}.weight",)),
            *(
                Row(f"{ours}.attention.qkv.{kind}", names, query_key_value(model))
                for kind, names in projections.items()
            ),
            *(
                Row(f"{ours}.attention.{name}_norm.weight", (f"{theirs}.self_attn.{norm}.weight",))
                for name, norm in (("query", "q_norm"), ("key", "k_norm"))
            ),
            Row(f"{ours}.attention.output.weight", (f"{theirs}.self_attn.o_proj.weight",)),
            Row(f"{ours}.ffn_norm.weight", (f"{theirs}.{feed_forward}.weight",)),
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


class _WithoutHeadWidth(Family, ABC):
    """A family whose heads have the width hidden / heads."""

    def more_mismatches(self, model: ModelConfig) -> list[str]:
        """Refuse other head widths, which the family cannot express."""
        return head_width_mismatch(model)


class _WithoutWindow(Family, ABC):
    """A family whose configuration can name windows, which differ by layer."""

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a model with windows in some layers."""
        super().refuse_variants(theirs)
        if others := set(theirs.get("layer_types") or ()) - {"full_attention"}:
            raise DataError(
                f"config.json: layer_types contains {sorted(others)[0]!r}, which is not supported, "
                f"only 'full_attention'\n  do: our {self.name} has no windows; nothing was written"
            )


class Llama(LlamaLike):
    """Llama 1 to 3.2."""

    name = "llama"
    architecture = "LlamaForCausalLM"
    settings = (
        *SIZES,
        Setting("kv_heads", "num_key_value_heads", None),
        Setting("head_dim", "head_dim", None),
        Setting("norm_epsilon", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
    )
    required: ClassVar[Mapping[str, Any]] = {**LlamaLike.required, "mlp_bias": False}


class Mistral(LlamaLike):
    """Mistral 7B, whose first version has a sliding window in every layer (arXiv:2310.06825)."""

    name = "mistral"
    architecture = "MistralForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {
        key: value for key, value in LlamaLike.wants.items() if key != "window"
    }
    settings = (
        *SIZES,
        Setting("kv_heads", "num_key_value_heads", 8),
        Setting("head_dim", "head_dim", None),
        Setting("norm_epsilon", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
        Setting("window", "sliding_window", 4096),
    )
    required: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}


class Qwen2(_WithoutWindow, _WithoutHeadWidth, LlamaLike):
    """Qwen 2 and 2.5: biases of queries, keys and values (arXiv:2407.10671)."""

    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {**LlamaLike.wants, "qkv_bias": True}
    settings = (
        *SIZES,
        Setting("kv_heads", "num_key_value_heads", 32),
        Setting("norm_epsilon", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
    )
    required: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "use_sliding_window": False}


class Qwen3(_WithoutWindow, LlamaLike):
    """Qwen 3 without experts: norms of each head of queries and keys (arXiv:2505.09388)."""

    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {**LlamaLike.wants, "qk_norm": "head"}
    settings = (
        *SIZES,
        Setting("kv_heads", "num_key_value_heads", 32),
        Setting("head_dim", "head_dim", 128),
        Setting("norm_epsilon", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
    )
    required: ClassVar[Mapping[str, Any]] = {**LlamaLike.required, "use_sliding_window": False}


class Olmo2(_WithoutHeadWidth, LlamaLike):
    """OLMo 2: norms of the outputs of branches, and of all queries and keys (arXiv:2501.00656)."""

    name = "olmo2"
    architecture = "Olmo2ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {
        **LlamaLike.wants, "qk_norm": "width", "norm_placement": "output",
    }  # fmt: skip
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    settings = (
        *SIZES,
        Setting("kv_heads", "num_key_value_heads", None),
        Setting("norm_epsilon", "rms_norm_eps", 1e-5),
        Setting("tied", "tie_word_embeddings", False),
    )
