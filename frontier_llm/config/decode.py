"""Decode composed values into a typed configuration.

An error names the wrong key, its value, the values that are legal, and a correction.
"""

import difflib
import json
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from frontier_llm.config.partner_copies import with_partner_copies
from frontier_llm.config.reading import SEVERAL
from frontier_llm.config.run import RunConfig
from frontier_llm.config.synonyms import KEYS, NOTES, nearest_value
from frontier_llm.errors import ConfigError

_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "keys with values",
    "NoneType": "null",
}
"""Types in the words of a user."""
_TYPE_ERRORS = (
    "int_type", "int_from_float", "float_type", "bool_type", "string_type", "literal_error",
    "tuple_type", "dict_type", "model_type",
)  # fmt: skip
"""Errors of pydantic that say no more than the type of the field."""
YAML_BOOLEANS = ("off", "on", "no", "yes")
"""Words that are true or false in a file of YAML unless they are quoted."""
_QUOTES = "; in a file, put off, on, no and yes in quotes: without them YAML reads true or false"
_EXAMPLES = (1, 0, 100, 128, 0.1, 0.5, 1.5, True, [1], [0.1], "NAME", ["NAME"])


def decode(values: Mapping[str, Any], usual: Callable[[str], Any] = lambda key: None) -> RunConfig:
    """Decode composed values into a `RunConfig`.

    The values are nested plain dictionaries, from `conf/` and the command line, or from the
    config.yaml of a run. `usual` returns the value that a key has unless the user sets it; if it is
    legal, it is suggested instead of a wrong one. Raises a ConfigError if a key is wrong. The error
    describes the first wrong key and its correction.
    """
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _first_error(error, usual, values) from None
    return with_partner_copies(config)


def keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, type, documentation) for every key of the configuration."""
    for key, field in _fields(section, prefix):
        yield key, type_words(field.annotation), " ".join((field.description or "").split())


def defaults() -> dict[str, Any]:
    """Return the default of every key that has one, as a JSON value, by dotted key.

    Older versions did not have these keys, so their configurations lack them.
    """
    return {
        key: to_jsonable_python(field.get_default(call_default_factory=True))
        for key, field in _fields(RunConfig)
        if not field.is_required()
    }


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key with its field."""
    for name, field in section.model_fields.items():
        if (nested := _section_of(field)) is not None:
            yield from _fields(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds; None if the field is a key."""
    type_ = field.annotation
    return type_ if isinstance(type_, type) and issubclass(type_, BaseModel) else None


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value, such as ("model.layers", 4); an empty dictionary is a value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def nearest(key: str) -> str | None:
    """Return the key that a user may mean by a wrong one; None = none is similar."""
    key = key.replace("-", "_")
    known = [name for name, _, _ in keys()]
    full_names = {name.rpartition(".")[2]: name for name in reversed(known)}
    sections = {name.rpartition(".")[0] for name in known} - {""}
    section, _, last_part = key.rpartition(".")
    if last_part in KEYS and last_part not in full_names:
        return KEYS[last_part]
    if last_part == key and not difflib.get_close_matches(key, sections, cutoff=0.8):
        if similar := difflib.get_close_matches(key, list(full_names), n=1, cutoff=0.7):
            return full_names[similar[0]]
    if section in sections:  # the section, which all of its keys share, is no similarity
        start = f"{section}."
        own = [n.removeprefix(start) for n in [*known, *sections] if n.startswith(start)]
        if similar := difflib.get_close_matches(last_part, own, n=1, cutoff=0.6):
            return start + similar[0]
    elif similar := difflib.get_close_matches(key, [*known, *sections], n=1, cutoff=0.5):
        return similar[0]
    # compare the last part of the key alone, because its section may be wrong or missing
    similar = difflib.get_close_matches(last_part, list(full_names), n=1, cutoff=0.7)
    several = similar and sum(name.endswith(f".{similar[0]}") for name in known) > 1
    return full_names[similar[0]] if similar and not several else None


def unknown_key(key: str, got: object) -> ConfigError:
    """Build the error for a key that does not exist."""
    section, _, name = key.rpartition(".")
    if any(key == known for known, _, _ in keys()):  # a file has the dotted key as one word
        wants = f"the key {name} below {section}, not both in one word"
        return ConfigError(key, got, wants, f"in a file, write `{section}: {{{name}: {got}}}`")
    similar = nearest(key)
    has_section = any(known.startswith(f"{section}.") for known, _, _ in keys())
    listed = f"frontier-llm train --help {section}" if has_section else "that list"
    if similar == "sharding" and str(got) in {*"0123"}:  # DeepSpeed's stage
        similar += f"={'replicated' if str(got) == '0' else f'zero{got}'}"
    todo = f"did you mean {similar}?" if similar else f"choose a key of {listed}"
    if note := NOTES.get(name.replace("-", "_")):
        todo += f" ({note})"
    return ConfigError(key, got, "a key that `frontier-llm train --help` lists", todo)


def type_words(annotation: Any, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the type of a field in words, such as `int`, `one of a, b, c` or `int or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(argument, names) for argument in arguments)
    if origin is Annotated:
        return type_words(arguments[0], names)
    if annotation is type(None):
        return "null"
    if origin is tuple:
        item = type_words(arguments[0], names)
        return f"list of {item[2:]}s" if item.startswith("a ") else f"list of {item}"
    if origin is dict:
        return f"map to {type_words(arguments[1], names)}"
    if origin is not None:  # Literal
        return "one of " + ", ".join(str(argument) for argument in arguments)
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name)


def _first_error(
    error: ValidationError, usual: Callable[[str], Any], values: Mapping[str, Any]
) -> ConfigError:
    """Convert the first error that pydantic reports, where unknown keys come first."""
    details = min(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
    location = [str(part) for part in details["loc"]]
    if entry := _entry_error(details, values):
        return entry
    if not location:
        return ConfigError(
            "configuration", details["input"], "sections of keys", "restore its file"
        )
    if details["type"] == "extra_forbidden":
        return unknown_key(".".join(location), details["input"])
    key, field = _field_at(location)
    wants, got = type_words(field.annotation, _NAMES), details["input"]
    if (section := _section_of(field)) is not None:
        first, kind, _ = next(keys(section, f"{key}."))
        todo = f"set {first} ({kind})" + _QUOTES * isinstance(got, bool)
        return ConfigError(key, got, f"keys such as {first}", todo)
    if details["type"] == "missing":
        return ConfigError(key, "nothing", wants, _advice(key, field))
    if details["type"] not in _TYPE_ERRORS:
        wants += f": {_limit(details)}"
    kind = _NAMES.get(type(got).__name__, type(got).__name__)
    limits = [limit for limit in details.get("ctx", {}).values() if isinstance(limit, int | float)]
    likely = [value for value in (usual(key),) if value is not None]
    todo = _advice(key, field, got, *likely, *limits)
    if isinstance(got, float) and got.is_integer() and details["type"] in _TYPE_ERRORS:
        todo = f"write {key}={int(got)}"
    if isinstance(got, bool) and "number" not in wants:
        todo = todo.rstrip("?") + _QUOTES
    if key in ("data.path", "data.corpora"):
        todo = f"name one file or folder, or use {SEVERAL}"
    return ConfigError(key, f"{got!r} ({kind})", wants, todo)


def _limit(details: ErrorDetails) -> str:
    """Return what pydantic says of a value of the right type, in fewer words."""
    return details["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _entry_error(details: ErrorDetails, values: Mapping[str, Any]) -> ConfigError | None:
    """Build the error for an entry of a list of sections, such as data.corpora."""
    location = details["loc"]
    at = next((index for index, part in enumerate(location) if isinstance(part, int)), None)
    if at is None:
        return None
    key, field = _field_at([str(part) for part in location[:at]])
    section = next((a for a in get_args(field.annotation) if isinstance(a, type)), None)
    if section is None or not issubclass(section, BaseModel):
        return None
    got: Any = values
    for part in location[: at + 1]:
        got = got[part]
    known = list(section.model_fields)
    number, name = location[at], got.get("name") if isinstance(got, Mapping) else None
    entry = f"{key}, entry {int(number) + 1}" + (f" ({name})" if name is not None else "")
    part = str(location[at + 1]) if len(location) > at + 1 else ""
    wants = f"keys and values; the keys are {', '.join(known)}"
    todo = "write the entry as {" + ", ".join(f"{k}: ..." for k in known[:3]) + "}"
    if part:
        is_missing = details["type"] == "missing"
        got = f"no {part}" if is_missing else f"{part}: {details['input']}"
        todo = f"{'add' if is_missing else 'correct'} {part} of this entry"
        todo += _QUOTES * isinstance(details["input"], bool)
    if part in known:
        wants = type_words(section.model_fields[part].annotation, _NAMES)
        wants += "" if details["type"] in (*_TYPE_ERRORS, "missing") else f": {_limit(details)}"
    elif similar := difflib.get_close_matches(part, known, n=1, cutoff=0.5):
        todo = f"did you mean {similar[0]}?"
    return ConfigError(entry, got, wants, todo)


def _advice(key: str, field: FieldInfo, got: object = None, *limits: Any) -> str:
    """Return a setting that a key accepts: what the user may mean, a limit, or an example."""
    nested = [field.annotation, *get_args(field.annotation)]
    words = [word for type_ in nested for word in (type_, *get_args(type_)) if type(word) is str]
    if meant := nearest_value(key, got, words):
        return f"did you mean {key}={meant}?"
    type_: Any = Annotated[(field.annotation, key, *field.metadata)]
    adapter = TypeAdapter(type_, config=ConfigDict(strict=True))
    in_list = [[got]] if isinstance(got, str | int | float) else []
    first = (*in_list, *limits, 100 if "steps" in key else 2)
    for example in (*first, *_EXAMPLES, *words, *([word] for word in words)):
        with suppress(ValidationError):
            text = json.dumps(example)
            adapter.validate_json(text)
            return f"set a value such as {key}=" + text.replace('"', "")
    return f"set {key}=..., see `frontier-llm train --help`"


def _field_at(location: list[str]) -> tuple[str, FieldInfo]:
    """Return (key, field) to which the location of an error refers.

    A location also contains branches of unions and indices of lists, which are ignored.
    """
    path = location[:1]
    field = RunConfig.model_fields[path[0]]
    for part in location[1:]:
        if (section := _section_of(field)) is None:
            break
        path.append(part)
        field = section.model_fields[part]
    return ".".join(path), field
