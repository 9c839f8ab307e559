"""Explain mistakes in a user's configuration files, which hydra reports in its own terms.

A group is a folder of `conf/`, such as `model`; a choice of it is a file, such as `model=gpt_22b`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from frontier_llm.cli.group_files import choice_word, file_values, load_file, section_of
from frontier_llm.cli.package_files import conf_folders
from frontier_llm.config.decode import YAML_BOOLEANS
from frontier_llm.config.synonyms import nearest_value
from frontier_llm.errors import ConfigError

_VALUES = ("optimizer", "precision")
"""Groups whose `name` decides what a run does. In all others it is what is shown of the choice."""


def unreadable(error: yaml.YAMLError | UnicodeDecodeError) -> ConfigError:
    """Build the error for a file that is not YAML, with its line."""
    if isinstance(error, UnicodeDecodeError):
        files = (file for folder in conf_folders() for file in sorted(folder.rglob("*.yaml")))
        file = next((str(file) for file in files if not _is_text(file)), "a file of --conf-dir")
        return ConfigError(file, str(error), "text in UTF-8", "save the file as UTF-8")
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).splitlines())
    file, line = (mark.name, mark.line + 1) if mark is not None else ("a file of --conf-dir", "?")
    hint = "correct the line, or the end of the line before it"
    if r"'\t'" in problem:
        hint = "indent with spaces"
    elif "duplicate key" in problem:
        hint = "write the key once, with all that belongs below it"
    return ConfigError(f"{file}, line {line}", problem, "YAML: key: value", hint)


def _is_text(file: Path) -> bool:
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def refused_default(group: str, name: str, groups: Mapping[str, list[str]]) -> ConfigError | None:
    """Return the error for the entry of a file's `defaults` that hydra cannot use, if it is known.

    An experiment chooses a file with `- override /GROUP: NAME`.
    """
    for word, chosen in _choices_in_defaults(group, name):
        of = word.split()[-1].lstrip("/").partition("@")[0].removeprefix("planner.")
        if of not in groups:
            continue
        key, right = f"defaults of {group}={name}", f"override /{choice_word(of)}"
        if chosen not in groups[of]:
            meant = nearest_value(of, chosen, groups[of])
            wants = f"a file of {of}: {', '.join(groups[of])}"
            todo = f"write `- {right}: {_in_yaml(meant or 'NAME')}`"
            return ConfigError(key, f"{word}: {chosen}", wants, todo)
        if group == "experiment" and word != right:
            wants = f"`override` and a path from the root: {of} has a choice already"
            return ConfigError(key, f"{word}: {chosen}", wants, f"write `- {right}: {chosen}`")
    return None


def _choices_in_defaults(group: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield what the entries of a file's `defaults` say, such as ("override /model", "gpt_22b")."""
    defaults = load_file(group, name).get("defaults") or []
    for entry in [defaults] if isinstance(defaults, Mapping) else defaults:
        if isinstance(entry, Mapping):
            yield from ((str(key), str(value)) for key, value in entry.items())


def check_choices(
    values: DictConfig, chosen: Mapping[str, str | None], groups: Mapping[str, list[str]]
) -> None:
    """Refuse a choice that is written as a value: `sharding: zero3`, or its name alone.

    Otherwise a run would train with the values of one file under the name of another one.

    Args:
        values: composed values, whose interpolations need not be resolvable.
        chosen: name of the chosen file by group.
    """
    raw = OmegaConf.to_container(values)
    for group, names in groups.items():
        section = section_of(group)
        found: Any = raw
        for part in section.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        file = chosen.get(choice_word(group))
        got = found.get("name") if isinstance(found, Mapping) else found
        if file is None or not isinstance(got, str):
            continue
        if isinstance(found, Mapping) and (group in _VALUES or got not in names):
            continue
        if isinstance(found, Mapping) and got == _own_name(group, file):
            continue
        key = f"{section}.name" if isinstance(found, Mapping) else section
        meant = (got if got in names else nearest_value(section, got, names)) or "NAME"
        wants = f"a file of {group}, chosen as a whole: a name alone changes no other value"
        todo = f"{section}={meant} on the command line"
        if experiment := chosen.get("experiment"):
            choice = f"override /{choice_word(group)}: {_in_yaml(meant)}"
            line = meant if group == "experiment" else choice
            todo = f"`- {line}` under `defaults:` of experiment {experiment}, or {todo}"
        todo = f"write {todo}"
        raise ConfigError(key, f"{got}, with the values of {section}={file}", wants, todo)


def _in_yaml(name: str) -> str:
    """Return a text as it is written in a file."""
    return f'"{name}"' if name in YAML_BOOLEANS else name


def _own_name(group: str, file: str) -> str:
    """Return the name that a file gives itself, or its file's name if it depends on other keys."""
    name = str(file_values(group, file).get("name", file))
    return file if re.search(r"\$\{", name) else name
