"""What a family of models is to the conversion."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import DataError
from tools.convert.settings import Setting, Values, look_up, put
from tools.convert.table import Row
from tools.convert.transforms import Heads


class Family(ABC):
    """Models that differ by numbers alone: one table of tensors, one of settings."""

    name: ClassVar[str]
    """Theirs: `model_type` in config.json."""
    architecture: ClassVar[str]
    """Theirs: the class that is to be made."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Endings of names that carry nothing: buffers, and second names of tied weights."""
    prefix: ClassVar[str] = ""
    """Of most names; some folders leave it out."""
    wants: ClassVar[Mapping[str, Any]]
    """Settings of ours that the family leaves no choice of."""
    choices: ClassVar[Mapping[str, Any]] = {"residual": ("sequential",)}
    """Settings of ours, and what they may be."""
    settings: ClassVar[Sequence[Setting]]
    """What may differ from model to model."""
    required: ClassVar[Mapping[str, Any]] = {}
    """Settings of theirs that we compute with, and nothing else; what they default to."""
    written: ClassVar[Mapping[str, Any]] = {}
    """Settings of theirs that are said besides, for their sake."""

    @abstractmethod
    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table, unfolded for a model."""

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate a configuration of ours to config.json's settings."""
        theirs: Values = {}
        for key, value in {**self.required, **self.written}.items():
            if value is not None:
                put(theirs, key, value)
        for setting in self.settings:
            for key in setting.keys:
                put(theirs, key, setting.write(config))
        return theirs

    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json to settings of `model` and, with their dots, of other sections.

        Raises:
            KeyError: with the name of what it lacks.
        """
        return {setting.ours: setting.read(theirs) for setting in self.settings}

    def mismatches(self, model: ModelConfig) -> list[str]:
        """Say what of a model of ours this family does not have."""
        wrong = [
            f"model.{key}={getattr(model, key)}, not {value}"
            for key, value in self.wants.items()
            if getattr(model, key) != value
        ]
        wrong += [
            f"model.{key}={getattr(model, key)}, not {' or '.join(values)}"
            for key, values in self.choices.items()
            if getattr(model, key) not in values
        ]
        return wrong + self.more_mismatches(model)

    def more_mismatches(self, model: ModelConfig) -> list[str]:
        """Say what of it is a matter of several settings."""
        return []

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a model of theirs that computes what ours does not.

        Raises:
            DataError: naming the key of config.json.
        """
        allowed: list[tuple[tuple[str, ...], tuple[Any, ...]]] = [
            *(((key,), (value,)) for key, value in self.required.items()),
            *((one.keys, tuple(one.words)) for one in self.settings if one.words),
        ]
        for keys, values in allowed:
            found = look_up(theirs, keys, values[0])
            if found not in values:
                raise DataError(
                    f"config.json: {keys[0]}={found!r} is not supported, only "
                    + " or ".join(map(repr, values))
                    + f"\n  do: our {self.name} has no such variant; nothing was written"
                )


def query_key_value(model: ModelConfig) -> Heads:
    """Return how ours fuses the three projections of self attention."""
    d = model.head_dim
    return Heads(model.kv_heads, (model.heads // model.kv_heads * d, d, d))


def head_width_mismatch(model: ModelConfig) -> list[str]:
    """Say so if heads are not as wide as hidden / heads."""
    if model.heads * model.head_dim == model.hidden:
        return []
    return [f"model.head_dim={model.head_dim}, not model.hidden / model.heads"]


def grouped_mismatch(model: ModelConfig) -> list[str]:
    """Say so if queries share keys and values."""
    if model.kv_heads == model.heads:
        return []
    return [f"model.kv_heads={model.kv_heads}, not model.heads"]
