"""What one file of `conf/` sets, read without composing."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from frontier_llm.cli.package_files import conf_file


def file_values(group: str, name: str) -> dict[str, Any]:
    """Return the values that a file sets, and those of the files of its group that it extends.

    Interpolations are left unresolved. Choices of other groups, as an experiment makes them, are
    left out.
    """
    content = OmegaConf.to_container(OmegaConf.load(conf_file(group, name)))
    assert isinstance(content, dict)
    own = {str(key): value for key, value in content.items()}
    values: dict[str, Any] = {}
    for base in own.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            values = overlaid(values, file_values(group, base))
    return overlaid(values, own)


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values: those of `above`, and those of `below` that `above` does not set."""
    values = dict(below)
    for key, value in above.items():
        old = values.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            values[key] = overlaid(old, value)
        else:
            values[key] = value
    return values


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested values; an empty dictionary counts as a value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
