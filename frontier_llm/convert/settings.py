"""Map the keys of Hugging Face's config.json ("theirs") to our configuration ("ours")."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from frontier_llm.config.run import RunConfig

Values = dict[str, Any]
"""Content of config.json, or values of our configuration by key."""
NEEDED: Final = object()
"""Stands for the default value of a key that config.json must contain."""


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
