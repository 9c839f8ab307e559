"""Translate rotary positions between our configuration and Hugging Face's config.json.

config.json describes rotary positions by an object. transformers names it `rope_parameters` since
version 5 and `rope_scaling` before; older files write the base beside it.
"""

from abc import ABC
from typing import Any, ClassVar

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.convert.base_family import Family, Values, look_up
from frontier_llm.errors import DataError

_TYPES = {"none": "default", "llama3": "llama3", "yarn": "yarn"}
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
