"""Read the search that a file of `conf/sweep` describes: its plugins of hydra and its axes.

Hydra itself composes the file when `sweep=NAME` chooses it. `frontier_llm.cli.sweep` reads it
before, because a mistake in it must be refused before the first trial.
"""

from collections.abc import Sequence

from frontier_llm.cli.compose import groups
from frontier_llm.cli.group_files import file_choices, file_values, leaves, overlaid

GROUP = "sweep"
_AXES_KEY = "hydra.sweeper.params"
_WITHOUT_AXES = {"hydra": {"sweeper": {"params": None}}}


def file_settings(overrides: Sequence[str]) -> list[str]:
    """Return the search of the chosen file as overrides, such as `parallel.tensor=choice(1,2)`.

    They are its plugins of hydra, with their settings, and its axes. Keys that the command line
    sets are left out. The other keys of the file are not part of the search.

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
    values = overlaid(_WITHOUT_AXES, file_values(GROUP, name))
    axes = values["hydra"]["sweeper"]["params"] or {}
    of_plugins = {
        key: value
        for key, value in leaves(values["hydra"], "hydra.")
        if not key.startswith(_AXES_KEY)
    }
    settings = {**plugins, **of_plugins, **axes}
    return [f"{key}={value}" for key, value in settings.items() if key not in given]


def key_of(override: str) -> str:
    """Return the key of an override."""
    return override.partition("=")[0].lstrip("+~")
