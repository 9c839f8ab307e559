"""The table of a family's settings: which key of config.json is which of ours."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from frontier_llm.config.run import RunConfig

Values = dict[str, Any]
NEEDED: Final = object()
"""The default of what config.json must say."""


@dataclass(frozen=True)
class Setting:
    """One setting, by the names of both."""

    ours: str
    """A field of `model`, or with dots of another section."""
    theirs: str | tuple[str, ...]
    """Keys of config.json, with dots where they are nested; all are written, the first is read."""
    default: Any = NEEDED
    """What it means, in their words, where config.json has none of the keys."""
    words: Mapping[Any, Any] | None = None
    """Theirs to ours where values differ too. The first is the default; of several for one of ours
    the first is written."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Theirs."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def write(self, config: RunConfig) -> Any:
        """Return a configuration's value in their words."""
        section, _, field = self.ours.rpartition(".")
        value = getattr(getattr(config, section or "model"), field)
        if self.words is None:
            return value
        return next(theirs for theirs, ours in self.words.items() if ours == value)

    def read(self, theirs: Values) -> Any:
        """Return config.json's value in our words.

        Raises:
            KeyError: it has none, and needs one.
        """
        if self.words is not None:
            return self.words[look_up(theirs, self.keys, next(iter(self.words)))]
        value = look_up(theirs, self.keys, self.default)
        if value is NEEDED:
            raise KeyError(self.keys[-1])
        return value


def look_up(theirs: Values, keys: Iterable[str], default: Any) -> Any:
    """Return what stands under the first of some keys that is there."""
    for key in keys:
        found: Any = theirs
        for name in key.split("."):
            found = found.get(name, NEEDED) if isinstance(found, dict) else NEEDED
        if found is not NEEDED:
            return found
    return default


def put(theirs: Values, key: str, value: Any) -> None:
    """Write a value under a key that may be nested."""
    *path, last = key.split(".")
    for name in path:
        theirs = theirs.setdefault(name, {})
    theirs[last] = value
