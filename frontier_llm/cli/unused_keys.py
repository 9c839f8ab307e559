"""Refuse keys that a user has set and that the rest of the configuration ignores."""

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from frontier_llm.cli.compose import compose
from frontier_llm.cli.group_files import file_choices, file_values, key_of, leaves
from frontier_llm.cli.options import TRIAL_VARIABLE
from frontier_llm.config import decode
from frontier_llm.config.needed import Need, unused
from frontier_llm.config.renamed import RENAMED_KEYS, current_override
from frontier_llm.errors import ConfigError


def configured(overrides: Sequence[str], searched: Collection[str] = ()) -> dict[str, Any]:
    """Compose the values of a command line, and refuse what it sets without effect.

    A key counts as set if the command line or the chosen experiment gives it another value than it
    would have otherwise. Values of other files of conf/ are not refused, nor is the trial of a
    sweep, because a grid has trials in which one key makes another one idle.

    Args:
        searched: sections whose keys the command varies itself, such as `parallel` for a planner.
            Keys in them, and keys that need a setting in them, are not refused.

    Raises:
        ConfigError: an override is wrong, or a key that is set has no effect.
    """
    values = compose(overrides)
    config = decode(values, partial(_usual, overrides))
    if TRIAL_VARIABLE in os.environ:
        return values
    given = {key_of(current_override(word)): word for word in overrides}
    idle: dict[str, Need] = {}
    for key, need in unused(config):
        words = [key, *need.setting.split()]
        if not {key_of(word).partition(".")[0] for word in words} & set(searched):
            idle.setdefault(key, need)
    for key, need in idle.items():
        if _value(values, key) is None:  # null turns off what a preset sets
            continue
        # without a dot, such as `data`, it is a choice of a file
        names = [
            name for name in given if name == key or ("." in name and key.startswith(f"{name}."))
        ]
        for name in names:
            rest = [word for name_of, word in given.items() if name_of != name]
            if _differs(rest, key, values):
                todo = f"add {need.setting}, or leave {key} out"
                raise _without_effect(key, _value(values, key), need, todo)
    if experiment := given.get("experiment", "").partition("=")[2]:
        _check_experiment(experiment, idle)
    return values


def _check_experiment(name: str, idle: Collection[str]) -> None:
    """Refuse keys of an experiment's file that have no effect in the experiment itself either."""
    own = {RENAMED_KEYS.get(key, key) for key, _ in leaves(file_values("experiment", name))}
    if not own & set(idle):
        return
    values = compose([f"experiment={name}"])
    choices = [f"{group}={file}" for group, file in file_choices("experiment", name).items()]
    for key, need in unused(decode(values)):
        if key in own and _differs(choices, key, values):
            todo = f"choose {need.setting} in experiment {name}, or take {key} out of it"
            raise _without_effect(key, _value(values, key), need, todo)


def _differs(overrides: Sequence[str], key: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key has another value without the override that sets it."""
    try:
        return bool(_value(compose(overrides), key) != _value(values, key))
    except ConfigError:  # the other overrides need this one
        return True


def _usual(overrides: Sequence[str], key: str) -> Any:
    """Return the value of a key without the overrides that set it; None if they need these."""
    try:
        rest = [word for word in overrides if key_of(current_override(word)) != key]
        return _value(compose(rest), key)
    except (ConfigError, KeyError):
        return None


def _value(values: Mapping[str, Any], key: str) -> Any:
    value: Any = values
    for part in key.split("."):
        value = value[part]
    return value


def _without_effect(key: str, got: Any, need: Need, todo: str) -> ConfigError:
    return ConfigError(key, got, f"to be used with {need.setting}: {need.why}", todo)
