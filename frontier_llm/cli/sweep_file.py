"""Read the search that a file of `conf/sweep` describes: its plugins of hydra and its axes.

Hydra itself composes the file when `sweep=NAME` chooses it. `frontier_llm.cli.sweep` reads it
before, because a mistake in it must be refused before the first trial.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from frontier_llm.cli.compose import groups
from frontier_llm.cli.group_files import file_choices, file_values, overlaid

GROUP = "sweep"


def file_settings(overrides: Sequence[str]) -> list[str]:
    """Return the settings of the chosen file as overrides, such as `parallel.tensor=choice(1,2)`.

    They are its plugins of hydra and its axes. Keys that the command line sets are left out.

    Args:
        overrides: the command line. Without `sweep=NAME`, or with a name that no file has, there
            are no settings; `compose` refuses such a name.
    """
    given = {key_of(override): override.partition("=")[2] for override in overrides}
    name = given.get(GROUP)
    if name is None or name not in groups().get(GROUP, ()):
        return []
    choices = file_choices(GROUP, name)
    plugins = {group: choice for group, choice in choices.items() if group.startswith("hydra/")}
    settings = {**plugins, **_axes(file_values(GROUP, name))}
    return [f"{key}={value}" for key, value in settings.items() if key not in given]


def key_of(override: str) -> str:
    """Return the key of an override."""
    return override.partition("=")[0].lstrip("+~")


def _axes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `hydra.sweeper.params` of a file."""
    nested = overlaid({"hydra": {"sweeper": {"params": {}}}}, values)
    return dict(nested["hydra"]["sweeper"]["params"] or {})
