"""Read values of another program one by one, and keep account of what each of them means here."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from frontier_llm.errors import ConfigError

LARGEST = {"model.layers": 10_000, "": 10**9}
"""Largest integer that a file may contain for a key of ours, and otherwise."""
SHOWN = 60
"""Largest number of characters of a value that is shown."""
AUTO = "auto"
"""A value that another program fills in, such as Hugging Face's Trainer in a DeepSpeed file."""
UNSET: tuple[Any, ...] = (None, False, "", "None", "False", "[]", [], {})
"""Values of arguments that are not in use."""


@dataclass
class ForeignRun:
    """A run of another program: what its file says, as keys of our configuration."""

    program: str
    engine: str
    """The file of conf/engine that comes nearest to the program."""
    engine_note: str
    """What is known about the error of this engine for the program."""
    ranks: int | None = None
    keys: dict[str, str] = field(default_factory=dict)
    """Overrides, groups included, by key."""
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    """Their key, its value, and what it means here."""
    ignored: list[str] = field(default_factory=list)
    """Their keys that influence neither time nor memory."""
    unknown: list[str] = field(default_factory=list)
    """Their keys that are not known here, with values."""
    notes: list[str] = field(default_factory=list)
    """What the plan assumes, or counts only nearly."""
    missing: dict[str, str] = field(default_factory=dict)
    """Keys without a value, and the reason."""
    search: tuple[str, ...] = ()
    """Further restrictions of the layouts that the program can run, as overrides."""


class Reading:
    """The values of a file, from which a `ForeignRun` is built.

    `given` are the overrides of the command line. They hold in place of the file's values.
    """

    def __init__(
        self,
        run: ForeignRun,
        where: str,
        values: Mapping[str, Any],
        given: Mapping[str, str],
        spell: Callable[[str], str] = str,
    ) -> None:
        self.run, self.values, self._where, self.given = run, values, where, given
        self._spell = spell
        self._used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value; the default if the file has none, or names an unknown variable."""
        self._used.add(name)
        value = self.values.get(name)
        return default if value in (None, "None", "") or self.is_open(value) else value

    def integer(self, name: str, default: Any = None, key: str = "", least: int = 1) -> Any:
        """Return an integer; of a key of ours, the value on the command line has precedence."""
        given = self.given.get(key, "")
        if re.fullmatch("[0-9]{1,12}", given):
            self.get(name)
            return int(given)
        value = self.get(name)
        if value is None:
            return default
        digits = isinstance(value, str) and re.fullmatch("[-+]?[0-9]{1,13}", value.strip())
        most = LARGEST.get(key, LARGEST[""])
        whole = type(value) is int or (isinstance(value, float) and value.is_integer())
        number = int(value) if digits or whole else None
        if number is None or not least <= number <= most:
            raise self.refused(name, f"a whole number from {least} to {most}", "correct it")
        return number

    def whole(self, name: str, key: str, default: Any = None) -> Any:
        """Return an integer, and note that it is the value of a key of ours."""
        value = self.integer(name, default, key)
        self.means(name, {key: value})
        return value

    def choose(self, name: str, key: str, words: Mapping[str, str], default: str) -> str:
        """Return our word for one of theirs, and note that it is the value of a key of ours."""
        value = self.word(name, words, default)
        self.means(name, {key: value})
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number from 0 to 1."""
        value = self.get(name, default)
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = -1.0
        if isinstance(value, bool) or not 0 <= found <= 1:
            raise self.refused(name, "a number from 0 to 1", "correct it")
        return found

    def flag(self, name: str) -> bool:
        """Return whether a switch is on."""
        value = self.get(name, False)
        if value in (True, "True", "true", "1"):
            return True
        if value in (False, "False", "false", "0"):
            return False
        raise self.refused(name, "true or false", "correct it")

    def word(self, name: str, words: Mapping[str, str], default: str) -> str:
        """Return our word for one of theirs."""
        value = str(self.get(name, default))
        if value not in words:
            raise self.refused(name, "one of " + ", ".join(words), "correct it")
        return words[value]

    def means(self, names: str, keys: Mapping[str, Any] | None = None, meaning: str = "") -> None:
        """Note which keys of ours the values of some names mean; None = the value is missing."""
        found = []
        for key, value in (keys or {}).items():
            opened = [name for name in names.split() if self.is_open(self.values.get(name))]
            if value is None or opened:
                if key not in self.given:
                    self.run.missing[key] = (
                        f"{self._spell(opened[0])} is {_shown(self.values[opened[0]])} there"
                        if opened
                        else f"no {self._names(names)}"
                    )
            else:
                self.run.keys[key] = written(value)
                found.append(f"{key}={written(value)}")
        present = [name for name in names.split() if name in self.values]
        self._used.update(present)
        shown = ", ".join(_shown(self.values[name]) for name in present) or "(default)"
        text = meaning or " ".join(found)
        if text:
            self.run.rows.append((self._names(" ".join(present) or names), shown, text))

    def refuse_if(self, names: str, reason: str, *harmless: Any) -> None:
        """Refuse a run that uses something that the planner cannot count."""
        for name in names.split():
            self._used.add(name)
            value = self.values.get(name)
            if value not in (*UNSET, *harmless):
                todo = "plan a copy of the file without it"
                if "dense decoders" in reason:
                    todo = "plan a dense model in its place, with model=NAME of conf/model"
                raise self.refused(name, f"a run without it: {reason}", todo)

    def nearly(self, names: str, note: str, *harmless: Any) -> None:
        """Note that something in use is only nearly counted, or not at all."""
        found = []
        for name in names.split():
            if name in self.values and self.values[name] not in (*UNSET, *harmless):
                found.append(f"{self._spell(name)} ({_shown(self.values[name])})")
            self._used.add(name)
        if found:
            self.run.notes.append(f"{', '.join(found)}: {note}")

    def optimizer(self, name: str, default: str) -> None:
        """Note an optimizer that has other states than AdamW."""
        value = str(self.get(name, default))
        if value.lower() not in ("adam", "adamw", "fusedadam"):
            self.run.notes.append(f"{self._spell(name)} ({_shown(value)}): planned as AdamW")

    def refused(self, name: str, wants: str, todo: str) -> ConfigError:
        """Return the error for a value."""
        key = f"{self._where}: {self._spell(name)}"
        return ConfigError(key, _shown(self.values.get(name)), wants, todo)

    def finish(self, ignorable: Sequence[str]) -> ForeignRun:
        """Sort the names that were not read into ignored and unknown ones."""
        for name in self.values:
            if name in self._used:
                continue
            if any(fnmatchcase(name, pattern) for pattern in ignorable):
                self.run.ignored.append(self._spell(name))
            elif self.values[name] not in UNSET:
                self.run.unknown.append(f"{self._spell(name)} = {_shown(self.values[name])}")
        return self.run

    def data_ranks(self, tensor: int, pipeline: int, context: int) -> int | None:
        """Return the number of data ranks, context ranks included; None if ranks are not known."""
        ranks, product = self.run.ranks, tensor * pipeline * context
        if ranks is None:
            return None
        if ranks % product:
            sizes = f"tensor {tensor} x pipeline {pipeline} x context {context}"
            wants = f"a multiple of {sizes} = {product}"
            todo = f"correct the sizes, or give the ranks, such as launch.ranks={product}"
            raise ConfigError(f"{self._where}: number of ranks", ranks, wants, todo)
        return ranks // tensor // pipeline

    def is_open(self, value: Any) -> bool:
        """Return whether a value has a variable that its file does not set, or is `auto`."""
        is_auto = value == AUTO and self.run.program == "DeepSpeed"
        return isinstance(value, str) and ("$" in value or "`" in value or is_auto)

    def _names(self, names: str) -> str:
        return ", ".join(self._spell(name) for name in names.split())


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested objects with dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def written(value: Any) -> str:
    """Write a value as the command line does."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, float):  # YAML reads 1e-05 as text; keys of type float accept integers
        return f"{value:.12f}".rstrip("0").rstrip(".")
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
