"""Decode composed values into a typed configuration, with errors that say what to do."""

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from frontier_llm.config.renamed import with_current_names
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError


def decode(values: Mapping[str, Any]) -> RunConfig:
    """Decode composed values into a `RunConfig`.

    Args:
        values: nested plain dictionaries, as composed from `conf/` and the command line, or read
            back from the config.yaml of a run. Old names of keys are accepted.

    Raises:
        ConfigError: the first wrong key, with what it got, what it wants and what to do.
    """
    try:
        return RunConfig.model_validate(with_current_names(values))
    except ValidationError as error:
        raise _first(error) from None


def keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, type, documentation) of every key of the configuration."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{key}.")
        else:
            doc = " ".join((field.description or "").split())
            yield key, type_words(field.annotation), doc


def nearest(key: str) -> str | None:
    """Return the existing key that is most similar to a mistyped one; None = none is similar."""
    known = [name for name, _, _ in keys()]
    groups = {name.rpartition(".")[0] for name in known} - {""}
    found = difflib.get_close_matches(key, [*known, *groups], n=1, cutoff=0.5)
    if found:
        return found[0]
    leaves = {name.rpartition(".")[2]: name for name in known}
    by_leaf = difflib.get_close_matches(key.rpartition(".")[2], list(leaves), n=1, cutoff=0.7)
    return leaves[by_leaf[0]] if by_leaf else None


def unknown_key(key: str, got: object) -> ConfigError:
    """Build the error for a key that does not exist."""
    similar = nearest(key)
    todo = f"did you mean {similar}?" if similar else "see `frontier-llm train --help` for all keys"
    return ConfigError(key, got, "no such key exists", todo)


def type_words(annotation: Any) -> str:
    """Return a field's type in words: `int`, `one of a, b, c`, `int or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(a) for a in arguments)
    if origin is Annotated:
        return type_words(arguments[0])
    if annotation is type(None):
        return "null"
    if origin is tuple:
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return f"map to {type_words(arguments[1])}"
    if origin is not None:  # Literal
        return "one of " + ", ".join(str(a) for a in arguments)
    return getattr(annotation, "__name__", str(annotation))


def _first(error: ValidationError) -> ConfigError:
    details = min(error.errors(), key=lambda d: d["type"] != "extra_forbidden")
    location = [str(part) for part in details["loc"]]
    if details["type"] == "extra_forbidden":
        return unknown_key(".".join(location), details["input"])
    key, wants, doc = _field_at(location)
    if details["type"] == "missing":
        return ConfigError(key, "nothing", wants, f"add {key}: {doc}")
    got = details["input"]
    problem = details["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return ConfigError(key, f"{got!r} ({type(got).__name__})", f"{wants}: {problem}", doc or "-")


def _field_at(location: list[str]) -> tuple[str, str, str]:
    """Return (key, type, documentation) of the field that an error names.

    Branches of unions and indices of lists in the location are ignored.
    """
    section: type[BaseModel] = RunConfig
    path: list[str] = []
    wants, doc = "a value", ""
    for part in location:
        field = section.model_fields.get(part)
        if field is None:
            break
        path.append(part)
        wants, doc = type_words(field.annotation), " ".join((field.description or "").split())
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            section = field.annotation
    return ".".join(path) or ".".join(location), wants, doc
