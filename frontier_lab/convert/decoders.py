"""Define the families GPT-2, GPT-NeoX, and Llama with those that differ from it in few modules.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.

config.json describes rotary positions by an object. transformers names it `rope_parameters` since
version 5 and `rope_scaling` before; older files write the base beside it.
"""

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

from frontier_lab.convert.base_family import (
    PLAIN,
    SIZES,
    Family,
    Setting,
    Values,
    look_up,
    query_key_value,
)
from frontier_lab.convert.table import SAME, TRANSPOSED, Transform
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import DataError

_TYPES = {"none": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_TURNS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
"""Their names of our `rotary_slow_turns` and `rotary_fast_turns`, by scaling."""
_DEFAULT_TURNS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}
_BASE = "rope_theta"
_SHARE = "partial_rotary_factor"
_LENGTH = "original_max_position_embeddings"
_KNOWN = {
    "rope_type", "type", _BASE, _SHARE, "factor", _LENGTH, "attention_factor",
    "truncate", *_TURNS["llama3"], *_TURNS["yarn"],
}  # fmt: skip
"""Keys whose meaning we compute. `truncate` must be true."""
_TANH = {name: "gelu" for name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")}
"""Maps each of their names of the tanh approximation of GELU to ours."""


class RotaryFamily(Family, ABC):
    """A family with rotary positions, whose wavelengths may be stretched."""

    base_keys: ClassVar[tuple[str, ...]] = (_BASE,)
    """Keys of the base in older files of config.json."""

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate our configuration to the settings of config.json, in the new and old form."""
        theirs, model = super().to_theirs(config), config.model
        scaling = _scaling(model)
        parameters = theirs.setdefault("rope_parameters", {})
        parameters.update({_BASE: model.rotary_base, "rope_type": "default"}, **scaling)
        theirs.update(dict.fromkeys(self.base_keys, model.rotary_base))
        if scaling:
            theirs["rope_scaling"] = parameters
        return theirs

    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json to our settings."""
        ours, found = super().to_ours(theirs), _parameters(theirs)
        scaling = {name: key for key, name in _TYPES.items()}[_type(found)]
        ours["rotary_base"] = found.get(_BASE) or look_up(theirs, self.base_keys, 10000)
        ours["rotary_scaling"] = scaling
        if scaling == "none":
            plain = {"rotary_factor": 1.0, "rotary_original_length": None}
            return {**ours, **plain, "rotary_attention_factor": None}
        if scaling == "linear":
            return {**ours, "rotary_factor": found["factor"]}
        length = found.get(_LENGTH) or theirs["max_position_embeddings"]
        slow, fast = (
            found.get(key) or default
            for key, default in zip(_TURNS[scaling], _DEFAULT_TURNS[scaling], strict=True)
        )
        return {
            **ours,
            "rotary_factor": found.get("factor") or theirs["max_position_embeddings"] / length,
            "rotary_original_length": length,
            "rotary_slow_turns": slow,
            "rotary_fast_turns": fast,
            "rotary_attention_factor": found.get("attention_factor"),
        }

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a model with a setting that our model cannot compute."""
        super().refuse_variants(theirs)
        found = _parameters(theirs)
        kind = _type(found)
        if kind not in _TYPES.values():
            raise _refusal(f"rope_type={kind!r}", ", ".join(map(repr, _TYPES.values())))
        if found.get(_SHARE, 1.0) != self.wants.get("rotary_fraction", found.get(_SHARE, 1.0)):
            raise _refusal(f"{_SHARE}={found[_SHARE]!r}", "1.0")
        for key, value in found.items():
            if (key not in _KNOWN and value is not None) or (key == "truncate" and not value):
                raise _refusal(f"{key}={value!r}", "the keys of Llama 3.1 and of YaRN")


def _scaling(model: ModelConfig) -> Values:
    """Return their parameters of stretched wavelengths; empty without a scaling."""
    scaling = model.rotary_scaling
    if scaling == "none":
        return {}
    if scaling == "linear":
        return {"rope_type": "linear", "factor": model.rotary_factor}
    slow, fast = _TURNS[scaling]
    values = {
        "rope_type": _TYPES[scaling],
        "factor": model.rotary_factor,
        _LENGTH: model.rotary_original_length,
        slow: model.rotary_slow_turns,
        fast: model.rotary_fast_turns,
    }
    if model.rotary_attention_factor is not None:
        values["attention_factor"] = model.rotary_attention_factor
    return values


def _parameters(theirs: Values) -> Values:
    """Return the object of rotary positions, in the order in which transformers looks."""
    found: Any = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(found, dict) or any(isinstance(v, dict | list) for v in found.values()):
        raise _refusal(repr(found), "an object")
    return found


def _type(found: Values) -> Any:
    return found.get("rope_type", found.get("type", "default"))


def _refusal(got: str, wants: str) -> DataError:
    return DataError(
        f"config.json: rope_parameters or rope_scaling: {got} is not supported, only {wants}\n"
        "  do: our rotary positions have no such variant; nothing was written"
    )


def llama_settings(
    kv_heads: int | None, *others: Setting, epsilon: float = 1e-6, tied: bool = False
) -> tuple[Setting, ...]:
    """Return the settings of a relative of Llama, for what its config.json may leave out."""
    return (
        *SIZES,
        Setting("kv_heads", "num_key_value_heads", kv_heads),
        *others,
        Setting("norm_epsilon", "rms_norm_eps", epsilon),
        Setting("tied", "tie_word_embeddings", tied),
    )


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

    tables: ClassVar[Mapping[str, str]] = {
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
    }
    decoder_layers = "transformer.h"
    modules: ClassVar[Mapping[str, str]] = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    }

    def transform(self, ours: str, count: int, model: ModelConfig) -> Transform:
        """Return the transform: they transpose matrices, and join queries, keys and values."""
        if ".qkv." in ours:
            return query_key_value(model, joined=True)
        is_transposed = ours.endswith((".output.weight", ".up.weight", ".down.weight"))
        return TRANSPOSED if is_transposed else SAME


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

    tables: ClassVar[Mapping[str, str]] = {
        "embedding.tokens": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    }
    decoder_layers = "gpt_neox.layers"
    modules: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "attention.query_key_value",  # has the same rows as ours
        "attention.output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn.up": "mlp.dense_h_to_4h",
        "ffn.down": "mlp.dense_4h_to_h",
    }


class LlamaLike(RotaryFamily, ABC):
    """Rotary positions, RMS norm, SwiGLU, grouped queries; no biases but those of attention."""

    unused = (".rotary_emb.inv_freq",)
    copies: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    wants: ClassVar[Mapping[str, Any]] = {
        **PLAIN, "kind": "gpt", "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu",
        "bias": False, "qkv_bias": False, "rotary_fraction": 1.0, "dropout": 0.0,
    }  # fmt: skip
    required: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    tables: ClassVar[Mapping[str, str]] = {
        "embedding.tokens": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    }
    decoder_layers = "model.layers"
    modules: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.{q,k,v}_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    }


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
    settings = llama_settings(None, Setting("head_dim", "head_dim", None))
    required: ClassVar[Mapping[str, Any]] = {**LlamaLike.required, "mlp_bias": False}


class Mistral(LlamaLike):
    """Mistral 7B, whose first version has a sliding window in every layer (arXiv:2310.06825)."""

    name = "mistral"
    architecture = "MistralForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {
        key: value for key, value in LlamaLike.wants.items() if key != "window"
    }
    settings = (
        *llama_settings(8, Setting("head_dim", "head_dim", None)),
        Setting("window", "sliding_window", 4096),
    )
    required: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}


class Qwen2(_WithoutWindow, LlamaLike):
    """Qwen 2 and 2.5: biases of queries, keys and values (arXiv:2407.10671)."""

    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {**LlamaLike.wants, "qkv_bias": True}
    settings = llama_settings(32)
    required: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "use_sliding_window": False}


class Qwen3(_WithoutWindow, LlamaLike):
    """Qwen 3 without experts: norms of each head of queries and keys (arXiv:2505.09388)."""

    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {**LlamaLike.wants, "qk_norm": "head"}
    settings = llama_settings(32, Setting("head_dim", "head_dim", 128))
    required: ClassVar[Mapping[str, Any]] = {**LlamaLike.required, "use_sliding_window": False}


class Olmo2(LlamaLike):
    """OLMo 2: norms of the outputs of branches, and of all queries and keys (arXiv:2501.00656)."""

    name = "olmo2"
    architecture = "Olmo2ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {
        **LlamaLike.wants, "qk_norm": "width", "norm_placement": "output",
    }  # fmt: skip
    modules: ClassVar[Mapping[str, str]] = {
        **LlamaLike.modules,
        "attention_norm": "post_attention_layernorm",
        "ffn_norm": "post_feedforward_layernorm",
    }
    settings = llama_settings(None, epsilon=1e-5)
