"""Read the values that a single file of `conf/` sets, without composing a configuration.

A group is a folder of `conf/`, such as `model`. `frontier_llm.cli.compose` uses these values to
find contradictions between an experiment and other choices.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from frontier_llm.cli.package_files import conf_file
from frontier_llm.errors import ConfigError

SECTIONS = {"engine": "planner.engine"}
"""Sections of the groups that are not named after their section."""


def refuse_blanks(words: Sequence[str], index: int) -> None:
    """Refuse blanks beside the = of a setting, in one word or between words of a shell."""
    text, line = words[index], " ".join(words[index : index + 3])
    found = re.fullmatch(r"([^\s=]+)\s+=\s*(.+)", text, re.DOTALL)
    if found is None and not re.search(r"\s", text):
        found = re.match(r"([^\s=]+)(?: = ?|= )([^\s=]+)(?!\S)", line)
    if found is not None:
        setting = shlex.quote("=".join(found.groups()))
        wants = "key=value, without blanks beside the ="
        raise ConfigError(found[1], found[0], wants, f"write {setting}, without blanks")


def key_of(override: str) -> str:
    """Return the key of an override."""
    return override.partition("=")[0].lstrip("+~")


def section_of(group: str) -> str:
    """Return the section of the configuration whose keys the files of a group set."""
    return SECTIONS.get(group, group)


def placed(override: str) -> str:
    """Return an override with hydra's name of its group if it chooses a file of such a group.

    `planner.engine=fsdp` and `engine=fsdp` both become `engine@planner.engine=fsdp`.
    """
    key, equals, value = override.partition("=")
    for group, section in SECTIONS.items():
        if key in (group, section):
            return f"{choice_word(group)}{equals}{value}"
    return override


def choice_word(group: str) -> str:
    """Return the word by which a list of defaults and hydra name a group."""
    return f"{group}@{SECTIONS[group]}" if group in SECTIONS else group


def load_file(group: str, name: str) -> dict[str, Any]:
    """Return what a file contains, interpolations unresolved; a ConfigError if it has no keys."""
    path = conf_file(group, name)
    if not path.is_file():
        wants = f"a file of {group}: {path} does not exist"
        raise ConfigError(group, name, wants, "correct the name, or add the file")
    content = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict):
        wants = "keys and values, such as `trainer: {steps: 9}`"
        raise ConfigError(str(path), f"a {type(content).__name__}", wants, "correct the file")
    return {str(key): value for key, value in content.items()}


def file_values(group: str, name: str) -> dict[str, Any]:
    """Return the values of a file and of the files that it extends (`defaults: [BASE]`).

    Interpolations stay unresolved, except in the names of the files that it extends. Files of other
    groups, which an experiment chooses, are not read.
    """
    own, values = load_file(group, name), dict[str, Any]()
    for base in _extended(own.pop("defaults", [])):
        values = overlaid(values, file_values(group, base))
    return overlaid(values, own)


def bases(group: str, name: str) -> set[str]:
    """Return the names of the files that a file extends, and those that these extend."""
    own = set(_extended(load_file(group, name).get("defaults", [])))
    return own.union(*(bases(group, base) for base in own))


def size_of(group: str, file: str) -> int:
    """Return a number by which the files of a group ascend in size; 0 if they are no models."""
    values = file_values(group, file)
    layers, hidden = values.get("layers"), values.get("hidden")
    return layers * hidden**2 if isinstance(layers, int) and isinstance(hidden, int) else 0


def _extended(defaults: Sequence[object]) -> Iterator[str]:
    for base in defaults:
        if isinstance(base, str) and base != "_self_":
            path, _, _ = str(OmegaConf.create([base])[0]).partition("@")
            yield path.rpartition("/")[2]


def file_choices(group: str, name: str) -> dict[str, str]:
    """Return the files that a file chooses by `override /GROUP: NAME`, by group.

    Choices of the files that it extends are included. Groups of hydra, such as `hydra/sweeper`, are
    groups, too.
    """
    choices: dict[str, str] = {}
    for default in load_file(group, name).get("defaults", []):
        if isinstance(default, Mapping):
            of_default = {str(key).split()[-1].lstrip("/"): str(default[key]) for key in default}
        else:
            of_default = file_choices(group, default) if default != "_self_" else {}
        choices |= of_default
    return choices


def overlaid(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested values; where both have a key, the value of `top` is taken."""
    values = dict(base)
    for key, value in top.items():
        old = values.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            values[key] = overlaid(old, value)
        else:
            values[key] = value
    return values


def quoted(key: str, value: str, following: Sequence[str] = ()) -> str:
    """Return an override as it is typed in a shell; a list may go on in the words that follow."""
    ends = range(len(following) + 1) if value.startswith(("[", "{")) else ()
    joined = [" ".join([f"{key}={value}", *following[:end]]) for end in ends]
    for whole in (*joined, *(f"{key}={value}{end}" for end in (")", "]", "}", "}]"))):
        with suppress(HydraException):
            OverridesParser.create().parse_override(whole)
            return shlex.quote(whole)
    if value.startswith(("[", "{")):
        return shlex.quote(f"{key}=[" + ("{name: a, path: A}" if "{" in value else "a,b") + "]")
    return shlex.quote(f"{key}={in_quotes(value)}")


def in_quotes(value: str) -> str:
    """Return a text as hydra reads it, in double quotes."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
