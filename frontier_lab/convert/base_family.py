"""Define the interface of a family, a set of models with the same architecture, and its settings.

A setting maps a key of their config.json to our configuration.
"""

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from frontier_lab.convert.table import SAME, Row, Transform, expanded, split_heads
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import DataError

Values = dict[str, Any]
"""Content of config.json, or values of our configuration by key."""
NEEDED: Final = object()
"""Stands for the default value of a key that config.json must contain."""
PLAIN: Mapping[str, Any] = {
    "scaled_attention": True,
    **{
        name: field.default
        for name, field in ModelConfig.model_fields.items()
        if name == "rotary_local_base"
        or not (field.is_required() or name.startswith(("rotary_", "mup_")))
    },
}
"""The values that most families want of the variants that few families have: the defaults. The
classes have settings for rotary positions, and muP is refused for all of them."""


@dataclass(frozen=True)
class Setting:
    """One setting: its key in our configuration, and its key in their config.json."""

    ours: str
    """A field of our `model` section, or a dotted key of another section."""
    theirs: str | tuple[str, ...]
    """Keys of config.json, dotted if nested. All of them are written. The first one that exists is
    read."""
    default: Any = NEEDED
    """The value in config.json that is assumed if config.json contains none of the keys."""
    words: Mapping[Any, Any] | None = None
    """Maps each of their values to our value, if both sides write the value differently. Their
    default is the first entry. If several of their values correspond to ours, the first of them is
    written."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Their keys as a tuple."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def write(self, config: RunConfig) -> Any:
        """Return the value of our configuration as config.json writes it."""
        section, _, field = self.ours.rpartition(".")
        value = getattr(getattr(config, section or "model"), field)
        if self.words is None:
            return value
        return next(theirs for theirs, ours in self.words.items() if ours == value)

    def read(self, theirs: Values) -> Any:
        """Return the value of config.json as our configuration writes it.

        Raises:
            KeyError: config.json lacks a key that has no default.
            ValueError: the value is not a number or null.
        """
        if self.words is not None:
            return self.words[look_up(theirs, self.keys, next(iter(self.words)))]
        value = look_up(theirs, self.keys, self.default)
        if value is NEEDED or (value is None and self.default is NEEDED):
            raise KeyError(self.keys[-1])
        if value is not None and not (isinstance(value, int | float) and abs(value) < 1e18):
            raise ValueError(f"{self.keys[-1]} is not a number of plausible size")
        return value


def look_up(theirs: Values, keys: Iterable[str], default: Any) -> Any:
    """Return the value of the first key that exists in config.json, otherwise the default."""
    for key in keys:
        found: Any = theirs
        for name in key.split("."):
            found = found.get(name, NEEDED) if isinstance(found, dict) else NEEDED
        if found is not NEEDED:
            return found
    return default


def put(theirs: Values, key: str, value: Any) -> None:
    """Set a value of config.json. A dotted key is written as nested objects."""
    *path, last = key.split(".")
    for name in path:
        theirs = theirs.setdefault(name, {})
    theirs[last] = value


SIZES = (
    Setting("vocabulary", "vocab_size"),
    Setting("data.sequence_length", "max_position_embeddings"),
    Setting("hidden", "hidden_size"),
    Setting("layers", "num_hidden_layers"),
    Setting("heads", "num_attention_heads"),
    Setting("ffn", "intermediate_size"),
    Setting("attention_dropout", "attention_dropout", 0.0),
)
"""Settings whose keys in config.json are the same for most decoders."""


class Family(ABC):
    """Describes the models of one architecture: the names of their tensors and their settings."""

    name: ClassVar[str]
    """Value of `model_type` in their config.json."""
    architecture: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = ()
    """Suffixes of names of their buffers, which older versions of transformers saved."""
    copies: ClassVar[Mapping[str, str]] = {}
    """Suffixes of names of second copies of tied weights, and the name of the first copy."""
    carried: ClassVar[tuple[str, ...]] = ()
    """Parts of the names of tensors that our model does not compute with: they are kept beside it,
    and written again by an export."""
    prefix: ClassVar[str] = ""
    """Prefix of the names of their tensors, which some folders omit."""
    tables: ClassVar[Mapping[str, str]]
    """Their names of the modules outside of layers, by ours. Braces stand for several modules:
    `a.{q,k,v}_proj`."""
    modules: ClassVar[Mapping[str, str]]
    """Their names of the modules of a layer, by ours; some of them only some models have."""
    encoder_modules: ClassVar[Mapping[str, str]] = {}
    """Those that have other names in a layer of an encoder."""
    encoder_layers: ClassVar[str] = ""
    decoder_layers: ClassVar[str]
    """Their names of the layers of each side, before the number of a layer, which starts at 0 in
    each of them. We number layers through both."""
    wants: ClassVar[Mapping[str, Any]]
    """Fields of our `model` configuration, with the only value that this family allows."""
    choices: ClassVar[Mapping[str, Any]] = {"residual": ("sequential",)}
    """Fields of our `model` configuration, with the several values that this family allows."""
    settings: ClassVar[Sequence[Setting]]
    """Settings that differ between the models of the family."""
    required: ClassVar[Mapping[str, Any]] = {}
    """Keys of their config.json, with the only value that we support. If a key is absent, this
    value is assumed."""
    written: ClassVar[Mapping[str, Any]] = {}
    """Further keys and values that we write to their config.json."""

    def rows(self, model: ModelConfig) -> Iterator[Row]:
        """Yield the table of tensors of a model: a weight and a bias of each module.

        The model does not have all of them.
        """
        for ours, theirs in self.tables.items():
            yield from self._pair(ours, theirs, model)
        border = model.encoder_layers
        for layer in range(model.layers):
            prefix, modules = f"{self.decoder_layers}.{layer - border}", self.modules
            if layer < border:
                prefix = f"{self.encoder_layers}.{layer}"
                modules = {**modules, **self.encoder_modules}
            for ours, theirs in modules.items():
                yield from self._pair(
                    f"layers.{layer}.{ours}", f"{prefix}.{theirs}", model.side(layer)
                )

    def _pair(self, ours: str, theirs: str, model: ModelConfig) -> Iterator[Row]:
        for kind in ("weight", "bias"):
            names = tuple(f"{name}.{kind}" for name in expanded(theirs))
            transform = self.transform(f"{ours}.{kind}", len(names), model)
            yield Row(f"{ours}.{kind}", names, transform)

    def transform(self, ours: str, count: int, model: ModelConfig) -> Transform:
        """Return the transform of one of our tensors to `count` of theirs.

        Three are the projections of self-attention to queries, keys and values, and two those to
        keys and values, which we have in one fused matrix.
        """
        if count == 1:
            return SAME
        if count == 3:
            return query_key_value(model)
        return split_heads(model.kv_heads, (model.head_dim, model.head_dim))

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate our configuration to the settings of config.json."""
        theirs: Values = {}
        for key, value in {**self.required, **self.written}.items():
            if value is not None:
                put(theirs, key, value)
        for setting in self.settings:
            for key in setting.keys:
                put(theirs, key, setting.write(config))
        return theirs

    def carried_settings(self, theirs: Values) -> Values:
        """Return the part of config.json that is about the carried tensors."""
        return {}

    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json to our settings. A key without a dot is a field of `model`."""
        return {setting.ours: setting.read(theirs) for setting in self.settings}

    def mismatches(self, model: ModelConfig) -> list[str]:
        """Return the reasons why our model does not belong to this family."""
        allowed = {**{key: (value,) for key, value in self.wants.items()}, **self.choices}
        reasons = [
            f"model.{key}={found}, not {' or '.join(map(str, values))}"
            for key, values in allowed.items()
            if (found := getattr(model, key)) not in values
        ]
        if model.mup_base_hidden is not None:
            reasons.append(f"model.mup_base_hidden={model.mup_base_hidden}, not null")
        expressed = {setting.ours for setting in self.settings}
        if "kv_heads" not in expressed and model.kv_heads != model.heads:
            reasons.append(f"model.kv_heads={model.kv_heads}, not model.heads")
        if "head_dim" not in expressed and model.heads * model.head_dim != model.hidden:
            reasons.append(f"model.head_dim={model.head_dim}, not model.hidden / model.heads")
        return reasons

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a config.json that our model cannot compute; the error names the key."""
        allowed: list[tuple[tuple[str, ...], tuple[Any, ...]]] = [
            *(((key,), (value,)) for key, value in self.required.items()),
            *((setting.keys, tuple(setting.words)) for setting in self.settings if setting.words),
        ]
        for keys, values in allowed:
            found = look_up(theirs, keys, values[0])
            if found not in values:
                raise DataError(
                    f"config.json: {keys[0]}={found!r} is not supported, only "
                    + " or ".join(map(repr, values))
                    + f"\n  do: our {self.name} has no such variant; nothing was written"
                )
        for setting in self.settings:
            given = {key: look_up(theirs, [key], NEEDED) for key in setting.keys}
            first, *others = [key for key in given if given[key] is not NEEDED] or [""]
            for key in others:
                if given[key] != given[first]:
                    raise DataError(
                        f"config.json: {key}={given[key]!r} and {first}={given[first]!r}, but "
                        f"our {setting.ours} is one number for both\n"
                        "  do: give both the same value in config.json; nothing was written"
                    )


def query_key_value(model: ModelConfig, *, joined: bool = False) -> Transform:
    """Return the transform of the fused projections of self-attention."""
    width = model.head_dim
    rows = (model.heads // model.kv_heads * width, width, width)
    return split_heads(model.kv_heads, rows, joined=joined)
