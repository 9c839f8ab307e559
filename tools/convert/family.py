"""What a family of models is to the conversion."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import DataError
from tools.convert.table import Row
from tools.convert.transforms import Heads

Values = dict[str, Any]


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
    required: ClassVar[Mapping[str, Any]] = {}
    """Settings of theirs that we compute with, and nothing else; what they default to."""

    @abstractmethod
    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table, unfolded for a model."""

    @abstractmethod
    def to_theirs(self, config: RunConfig) -> Values:
        """Translate a configuration of ours to config.json's settings."""

    @abstractmethod
    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json to settings of `model` and, with their dots, of other sections."""

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
        for key, value in self.required.items():
            wanted = value if isinstance(value, tuple) else (value,)
            if theirs.get(key, wanted[0]) not in wanted:
                raise DataError(
                    f"config.json: {key}={theirs[key]!r} is not supported, only "
                    + " or ".join(map(repr, wanted))
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
