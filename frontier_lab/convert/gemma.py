"""Define the families Gemma 2 and Gemma 3 (its text decoder).

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from frontier_lab.convert.base_family import Setting, Values
from frontier_lab.convert.decoders import LlamaLike, llama_settings
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import DataError

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_OF_KIND = {
    "window", "window_every", "score_width", "attention_softcap", "logit_softcap", "qk_norm",
    "rotary_local_base",
}  # fmt: skip
"""Fields of which the models of a family have different values, or the two families have."""
WITHOUT_EFFECT = {
    "architectures", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "hidden_act", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache",
    "_name_or_path", "_sliding_window_pattern",
}  # fmt: skip
"""Keys of config.json that do not change the logits. `hidden_act` is not read."""
_ELSEWHERE = {
    "layer_types", "sliding_window_pattern", "rope_parameters", "rope_scaling", "rope_theta",
    "rope_local_base_freq", "use_bidirectional_attention",
}  # fmt: skip
"""Keys that the methods of the families read."""


class Gemma2(LlamaLike):
    """Gemma 2 (arXiv:2408.00118): bounded scores and logits, every second layer has a window."""

    name = "gemma2"
    architecture = "Gemma2ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {
        **{key: value for key, value in LlamaLike.wants.items() if key not in _OF_KIND},
        "activation": "geglu", "norm_placement": "both", "zero_centred_norms": True,
        "scaled_embedding": True, "qk_norm": "none", "rotary_local_base": None,
    }  # fmt: skip
    modules: ClassVar[Mapping[str, str]] = {
        **LlamaLike.modules,
        "attention_output_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_output_norm": "post_feedforward_layernorm",
    }
    settings: ClassVar[Sequence[Setting]] = (
        *llama_settings(4, Setting("head_dim", "head_dim", 256), tied=True),
        Setting("score_width", "query_pre_attn_scalar", 256),
        Setting("attention_softcap", "attn_logit_softcapping", 50.0),
        Setting("logit_softcap", "final_logit_softcapping", 30.0),
        Setting("window", "sliding_window", 4096),
    )
    required: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }
    every: ClassVar[int] = 2
    """Each layer with this number has no window, if config.json does not say which."""

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate our configuration to the settings of config.json."""
        model = config.model
        width = float(model.score_width or model.head_dim)
        return {
            **super().to_theirs(config),
            "query_pre_attn_scalar": int(width) if width.is_integer() else width,
            "layer_types": _layer_types(model),
        }

    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json to our settings."""
        ours = super().to_ours(theirs)
        if ours["score_width"] == ours["head_dim"]:
            ours["score_width"] = None  # the default, which presets and other models have
        found, layers = theirs.get("layer_types"), theirs["num_hidden_layers"]
        usual = theirs.get("sliding_window_pattern") or self.every
        if found is None or found == _pattern(usual, layers):
            return {**ours, "window_every": usual}
        if set(found) == {_GLOBAL} and len(found) == layers:
            return {**ours, "window": None, "window_every": 1}
        for every in range(1, layers + 1):
            if found == _pattern(every, layers):
                return {**ours, "window_every": every}
        raise DataError(
            "config.json: these layer_types are not supported, only windows in all layers but each "
            f"k-th one\n  do: our {self.name} has no such variant; nothing was written"
        )

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a model with a setting that our model cannot compute or does not know."""
        super().refuse_variants(theirs)
        known = WITHOUT_EFFECT | _ELSEWHERE | self.required.keys()
        known |= {key for setting in self.settings for key in setting.keys}
        if theirs.get("use_bidirectional_attention"):
            known.remove("use_bidirectional_attention")
        self.refuse_unknown(theirs, known)

    def refuse_unknown(self, theirs: Values, known: Collection[str]) -> None:
        """Refuse keys that are not known, unless they are null."""
        unknown = [key for key, value in theirs.items() if key not in known and value is not None]
        if unknown:
            raise DataError(
                f"config.json: {unknown[0]}={theirs[unknown[0]]!r} is not supported\n"
                f"  do: our {self.name} has no such setting; nothing was written"
            )


class Gemma3(Gemma2):
    """Gemma 3 (arXiv:2503.19786): norms of heads; layers with a window have their own base."""

    name = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    wants: ClassVar[Mapping[str, Any]] = {
        **{key: value for key, value in Gemma2.wants.items() if key != "rotary_local_base"},
        "qk_norm": "head",
    }
    settings: ClassVar[Sequence[Setting]] = (
        *(s for s in Gemma2.settings if "softcap" not in s.ours),
        Setting("attention_softcap", "attn_logit_softcapping", None),
        Setting("logit_softcap", "final_logit_softcapping", None),
    )
    every: ClassVar[int] = 6

    def mismatches(self, model: ModelConfig) -> list[str]:
        """Return the reasons why our model does not belong to this family."""
        reasons = super().mismatches(model)
        if model.window is not None and model.rotary_local_base is None:
            reasons.append("model.rotary_local_base=None, with a window")
        return reasons

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate our configuration. Their rotary positions differ by the type of a layer."""
        theirs, base = super().to_theirs(config), config.model.rotary_local_base
        local = {"rope_theta": base or 10000, "rope_type": "default"}
        both = {_GLOBAL: theirs["rope_parameters"], _LOCAL: local}
        return {**theirs, "rope_parameters": both, "rope_local_base_freq": local["rope_theta"]}

    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json to our settings."""
        ours, (_, local) = super().to_ours(_flat(theirs)), _rotary_parameters(theirs)
        base = local.get("rope_theta") or theirs.get("rope_local_base_freq") or 10000
        return {**ours, "rotary_local_base": None if ours["window"] is None else base}

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a model with a setting that our model cannot compute or does not know."""
        super().refuse_variants(_flat(theirs))
        _, local = _rotary_parameters(theirs)
        if local.keys() - {"rope_theta", "rope_type"} or local.get("rope_type") not in (
            None, "default",
        ):  # fmt: skip
            raise DataError(
                f"config.json: rope_parameters: {_LOCAL}={local!r} is not supported, only a base\n"
                "  do: our layers with a window have no such variant; nothing was written"
            )


def _pattern(every: int, layers: int) -> list[str]:
    """Return the types of layers of which each `every`-th has no window, unless all have one."""
    is_global = [every > 1 and not number % every for number in range(1, layers + 1)]
    return [_GLOBAL if whole else _LOCAL for whole in is_global]


def _layer_types(model: ModelConfig) -> list[str]:
    windows = map(model.layer_window, range(model.layers))
    return [_GLOBAL if window is None else _LOCAL for window in windows]


def _rotary_parameters(theirs: Values) -> tuple[Values, Values]:
    """Return the objects of rotary positions of layers without a window, and of those with one."""
    both = theirs.get("rope_parameters") or {}
    if both.keys() - {_LOCAL, _GLOBAL}:
        raise DataError(
            f"config.json: rope_parameters={both!r} is not supported, only an object for each type "
            "of layers\n  do: write it as transformers does; nothing was written"
        )
    stretched = {**(both.get(_GLOBAL) or {}), **(theirs.get("rope_scaling") or {})}
    stretched.setdefault("rope_theta", theirs.get("rope_theta") or 1000000)
    return stretched, both.get(_LOCAL) or {}


def _flat(theirs: Values) -> Values:
    """Return config.json with the rotary positions of layers without a window alone."""
    stretched, _ = _rotary_parameters(theirs)
    return {**theirs, "rope_parameters": stretched, "rope_scaling": None}
