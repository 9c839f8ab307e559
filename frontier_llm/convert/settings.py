"""Map the keys of Hugging Face's config.json to the keys of our configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from frontier_llm.config.run import RunConfig

Values = dict[str, Any]
NEEDED: Final = object()
"""The default of a key that config.json must contain."""


@dataclass(frozen=True)
class Setting:
    """One setting with its names on both sides."""

    ours: str
    """A field of `model`, or a dotted key of another section."""
    theirs: str | tuple[str, ...]
    """Keys of config.json, dotted if nested. All are written; the first that exists is read."""
    default: Any = NEEDED
    """The value in their words if config.json contains none of the keys."""
    words: Mapping[Any, Any] | None = None
    """Their words and ours, if the values differ as well. The first entry is the default. If
    several of their words have the same meaning, the first is written."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Their keys as a tuple."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def write(self, config: RunConfig) -> Any:
        """Return the value of our configuration in their words."""
        section, _, field = self.ours.rpartition(".")
        value = getattr(getattr(config, section or "model"), field)
        if self.words is None:
            return value
        return next(theirs for theirs, ours in self.words.items() if ours == value)

    def read(self, theirs: Values) -> Any:
        """Return the value of config.json in our words.

        Raises:
            KeyError: config.json lacks a key that has no default.
        """
        if self.words is not None:
            return self.words[look_up(theirs, self.keys, next(iter(self.words)))]
        value = look_up(theirs, self.keys, self.default)
        if value is NEEDED:
            raise KeyError(self.keys[-1])
        return value


def look_up(theirs: Values, keys: Iterable[str], default: Any) -> Any:
    """Return the value of the first key that exists, otherwise the default."""
    for key in keys:
        found: Any = theirs
        for name in key.split("."):
            found = found.get(name, NEEDED) if isinstance(found, dict) else NEEDED
        if found is not NEEDED:
            return found
    return default


def put(theirs: Values, key: str, value: Any) -> None:
    """Write a value under a key, which is dotted if it is nested."""
    *path, last = key.split(".")
    for name in path:
        theirs = theirs.setdefault(name, {})
    theirs[last] = value
