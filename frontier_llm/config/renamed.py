"""Keys that have a new name. The old names go on working: in overrides, files and checkpoints."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

RENAMED_KEYS = {
    "data.pieces": "data.vocabulary",
    "launch.point_minutes": "launch.trial_minutes",
    "launch.point_value": "launch.trial_value",
}
"""The present name of each key by its old name."""


def current_override(text: str) -> str:
    """Return an override such as `data.pieces=300` with the present name of its key."""
    key, equals, value = text.partition("=")
    name = key.lstrip("+~")
    prefix = key[: len(key) - len(name)]
    return f"{prefix}{RENAMED_KEYS.get(name, name)}{equals}{value}"


def old_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the old names that composed values, or values read back from a file, contain."""
    for old in RENAMED_KEYS:
        section, _, name = old.partition(".")
        held = values.get(section)
        if isinstance(held, Mapping) and name in held:
            yield old


def with_current_names(values: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
    """Return values under the present names of their keys; the argument is not changed.

    Args:
        values: nested plain dictionaries.
        given: present names whose values stay as they are, because the command line set them.
            Otherwise the value under the old name counts: a file that uses the old name
            overrides a default under the new one.
    """
    renamed = dict(values)
    for old in old_names(values):
        new = RENAMED_KEYS[old]
        section, _, name = new.partition(".")
        held = dict(renamed[section])
        value = held.pop(old.partition(".")[2])
        if new not in given:
            held[name] = value
        renamed[section] = held
    run = renamed.get("run")
    if isinstance(run, Mapping) and isinstance(run.get("allow_changes"), (list, tuple)):
        allowed = [RENAMED_KEYS.get(key, key) for key in run["allow_changes"]]
        renamed["run"] = {**run, "allow_changes": allowed}
    return renamed
