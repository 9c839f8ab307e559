"""Keys that have been renamed. Old names still work in overrides, files and checkpoints."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

RENAMED_KEYS = {
    "data.pieces": "data.vocabulary",
    "launch.point_minutes": "launch.trial_minutes",
    "launch.point_value": "launch.trial_value",
}
"""The current name of each renamed key, by its old name."""


def current_override(text: str) -> str:
    """Return an override such as `data.pieces=300` with the current name of its key."""
    key, equals, value = text.partition("=")
    name = key.lstrip("+~")
    prefix = key[: len(key) - len(name)]
    return f"{prefix}{RENAMED_KEYS.get(name, name)}{equals}{value}"


def old_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the old names among the keys of composed values or of values read from a file."""
    for old in RENAMED_KEYS:
        section, _, name = old.partition(".")
        section_values = values.get(section)
        if isinstance(section_values, Mapping) and name in section_values:
            yield old


def with_current_names(values: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
    """Return a copy of composed values in which all keys have their current names.

    If a key is present under both names, the value under the old name counts, because a file that
    uses the old name overrides the default under the current name. Keys in `given`, which the
    command line has set under their current names, are an exception.
    """
    renamed = dict(values)
    for old in old_names(values):
        new = RENAMED_KEYS[old]
        section, _, name = new.partition(".")
        section_values = dict(renamed[section])
        value = section_values.pop(old.partition(".")[2])
        if new not in given:
            section_values[name] = value
        renamed[section] = section_values
    run = renamed.get("run")
    if isinstance(run, Mapping) and isinstance(run.get("allow_changes"), (list, tuple)):
        allowed = [RENAMED_KEYS.get(key, key) for key in run["allow_changes"]]
        renamed["run"] = {**run, "allow_changes": allowed}
    return renamed
