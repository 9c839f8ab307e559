"""Define the families GPT-2, GPT-NeoX, and Llama with those that differ from it in few modules.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.

config.json describes rotary positions by an object. transformers names it `rope_parameters` since
version 5 and `rope_scaling` before; older files write the base beside it.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
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
from frontier_lab.convert.table import SAME, TRANSPOSED, Row, Transform, unfold
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


def _pair(ours: str, theirs: str, transform: Transform = SAME) -> list[Row]:
    """Return the rows of the weight and the bias of a module; a bias is not transposed."""
    bias_transform = SAME if transform is TRANSPOSED else transform
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
        fused = query_key_value(model, joined=True)
        layer = [
            *_pair(f"{ours}.attention_norm", f"{theirs}.ln_1"),
            *_pair(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", fused),
            *_pair(f"{ours}.attention.output", f"{theirs}.attn.c_proj", TRANSPOSED),
            *_pair(f"{ours}.ffn_norm", f"{theirs}.ln_2"),
            *_pair(f"{ours}.ffn.up", f"{theirs}.mlp.c_fc", TRANSPOSED),
            *_pair(f"{ours}.ffn.down", f"{theirs}.mlp.c_proj", TRANSPOSED),
        ]
        return [
            Row("embedding.tokens.weight", ("transformer.wte.weight",)),
            Row("embedding.positions.weight", ("transformer.wpe.weight",)),
            *unfold(layer, range(model.layers)),
            *_pair("final_norm", "transformer.ln_f"),
        ]


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


class LlamaLike(RotaryFamily, ABC):
    """Rotary positions, RMS norm, SwiGLU, grouped queries; no biases but those of attention."""

    unused = (".rotary_emb.inv_freq",)
    copies: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    wants: ClassVar[Mapping[str, Any]] = {
        **PLAIN, "kind": "gpt", "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu",
        "bias": False, "qkv_bias": False, "rotary_fraction": 1.0, "dropout": 0.0,
    }  # fmt: skip
    required: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    norms: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    """Their names of the norms of a layer, by ours."""

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table. Their queries, keys and values are three tensors."""
        ours, theirs = "layers.{n}", "model.layers.{n}"
        projections = {
            kind: tuple(f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv")
            for kind in ("weight", "bias")
        }
        layer = [
            *(
                Row(f"{ours}.{name}.weight", (f"{theirs}.{norm}.weight",))
                for name, norm in self.norms.items()
            ),
            *(
                Row(f"{ours}.attention.qkv.{kind}", names, query_key_value(model))
                for kind, names in projections.items()
            ),
            *(
                Row(f"{ours}.attention.{name}_norm.weight", (f"{theirs}.self_attn.{norm}.weight",))
                for name, norm in (("query", "q_norm"), ("key", "k_norm"))
            ),
            Row(f"{ours}.attention.output.weight", (f"{theirs}.self_attn.o_proj.weight",)),
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


class Qwen2(_WithoutWindow, LlamaLike):
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


class Olmo2(LlamaLike):
    """OLMo 2: norms of the outputs of branches, and of all queries and keys (arXiv:2501.00656)."""

    name = "olmo2"
    architecture = "Olmo2ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {
        **LlamaLike.wants, "qk_norm": "width", "norm_placement": "output",
    }  # fmt: skip
    norms: ClassVar[Mapping[str, str]] = {
        "attention_norm": "post_attention_layernorm",
        "ffn_norm": "post_feedforward_layernorm",
    }
    settings = (
        *SIZES,
        Setting("kv_heads", "num_key_value_heads", None),
        Setting("norm_epsilon", "rms_norm_eps", 1e-5),
        Setting("tied", "tie_word_embeddings", False),
    )
