"""Define the interface of a family of models that can be converted.

"Their" means of the Hugging Face model, "our" means of this package.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.convert.settings import Setting, Values, look_up, put
from frontier_llm.convert.table import Row
from frontier_llm.convert.transforms import Heads
from frontier_llm.errors import DataError


class Family(ABC):
    """Models that share a table of tensors and a table of settings."""

    name: ClassVar[str]
    """`model_type` in their config.json."""
    architecture: ClassVar[str]
    """Name of their class."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Endings of their tensors that are not needed: buffers, and second names of tied weights."""
    prefix: ClassVar[str] = ""
    """Prefix of their tensor names, which some folders omit."""
    wants: ClassVar[Mapping[str, Any]]
    """Our settings that have a fixed value in this family."""
    choices: ClassVar[Mapping[str, Any]] = {"residual": ("sequential",)}
    """Our settings that are restricted to a set of values in this family."""
    settings: ClassVar[Sequence[Setting]]
    """Settings that differ between the models of the family."""
    required: ClassVar[Mapping[str, Any]] = {}
    """Keys of their config.json that must have this value; a key that is absent means the same."""
    written: ClassVar[Mapping[str, Any]] = {}
    """Additional settings that are written to their config.json."""

    @abstractmethod
    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table of tensors of a model."""

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

    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json to our settings.

        Returns:
            Values by field of `model`, or by dotted key of another section.

        Raises:
            KeyError: config.json lacks this key.
        """
        return {setting.ours: setting.read(theirs) for setting in self.settings}

    def mismatches(self, model: ModelConfig) -> list[str]:
        """Return the reasons why our model does not belong to this family."""
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
        """Return the reasons that depend on several settings."""
        return []

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a variant of their model that ours cannot compute.

        Raises:
            DataError: the message names the key of config.json.
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
    """Return the transform between our fused projection of self attention and their three ones.

    Theirs are the projections of query, key and value.
    """
    d = model.head_dim
    return Heads(model.kv_heads, (model.heads // model.kv_heads * d, d, d))


def head_width_mismatch(model: ModelConfig) -> list[str]:
    """Return a reason if the head width is not hidden / heads."""
    if model.heads * model.head_dim == model.hidden:
        return []
    return [f"model.head_dim={model.head_dim}, not model.hidden / model.heads"]


def grouped_mismatch(model: ModelConfig) -> list[str]:
    """Return a reason if several query heads share a key and a value head."""
    if model.kv_heads == model.heads:
        return []
    return [f"model.kv_heads={model.kv_heads}, not model.heads"]
