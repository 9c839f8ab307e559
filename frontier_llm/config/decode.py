"""Decode composed values into a typed configuration.

An error names the wrong key, its value, the values that are legal, and a correction.
"""

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from frontier_llm.config.partner_copies import with_partner_copies
from frontier_llm.config.renamed import with_current_names
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError


def decode(values: Mapping[str, Any]) -> RunConfig:
    """Decode composed values into a `RunConfig`.

    Args:
        values: nested plain dictionaries, as composed from `conf/` and the command line, or read
            back from the config.yaml of a run. Old names of keys are accepted.

    Raises:
        ConfigError: a key is wrong. The error describes the first wrong key and its correction.
    """
    try:
        config = RunConfig.model_validate(with_current_names(values))
    except ValidationError as error:
        raise _first_error(error) from None
    return with_partner_copies(config)


def keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, type, documentation) for every key of the configuration."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{key}.")
        else:
            doc = " ".join((field.description or "").split())
            yield key, type_words(field.annotation), doc


def defaults(section: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Return the default of every key that has one, as a JSON value, by dotted key.

    Older versions did not have these keys, so their configurations lack them.
    """
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= defaults(field.annotation, f"{key}.")
        elif not field.is_required():
            value = field.get_default(call_default_factory=True)
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def nearest(key: str) -> str | None:
    """Return the existing key that is most similar to a mistyped one; None = none is similar."""
    known = [name for name, _, _ in keys()]
    groups = {name.rpartition(".")[0] for name in known} - {""}
    similar = difflib.get_close_matches(key, [*known, *groups], n=1, cutoff=0.5)
    if similar:
        return similar[0]
    # compare the last part of the key alone, because its section may be wrong or missing
    full_names = {name.rpartition(".")[2]: name for name in known}
    last_part = key.rpartition(".")[2]
    similar = difflib.get_close_matches(last_part, list(full_names), n=1, cutoff=0.7)
    return full_names[similar[0]] if similar else None


def unknown_key(key: str, got: object) -> ConfigError:
    """Build the error for a key that does not exist."""
    similar = nearest(key)
    todo = f"did you mean {similar}?" if similar else "see `frontier-llm train --help` for all keys"
    return ConfigError(key, got, "no such key exists", todo)


def type_words(annotation: Any) -> str:
    """Return the type of a field in words, such as `int`, `one of a, b, c` or `int or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(argument) for argument in arguments)
    if origin is Annotated:
        return type_words(arguments[0])
    if annotation is type(None):
        return "null"
    if origin is tuple:
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return f"map to {type_words(arguments[1])}"
    if origin is not None:  # Literal
        return "one of " + ", ".join(str(argument) for argument in arguments)
    return getattr(annotation, "__name__", str(annotation))


def _first_error(error: ValidationError) -> ConfigError:
    """Convert the first error that pydantic reports, where unknown keys come first."""
    details = min(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
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
    """Return (key, type, documentation) of the field to which the location of an error refers.

    A location also contains branches of unions and indices of lists, which are ignored.
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
