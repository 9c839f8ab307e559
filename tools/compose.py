"""Compose `conf/` and the command line into plain values: the only door to hydra.

Composition happens once in a run, in one process; interpolations, `${now:}` among them, are
resolved here, so that everybody behind the door reads the same values. Every mistake in an
override is a `ConfigError`.
"""

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from frontier_llm.config.decode import decode, keys, nearest, unknown_key
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.elastic import refit

CONF = Path(__file__).resolve().parents[1] / "conf"
_NOT_OURS = ("hydra", "experiment")


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose the root of `conf/` with overrides such as `model=gpt_22b` or `trainer.steps=9`.

    Returns:
        Nested plain dictionaries, all interpolations resolved; not yet checked against the types
        of the configuration (frontier_llm.config.decode does that).

    Raises:
        ConfigError: an override is malformed, or names a key or a choice that does not exist.
    """
    parsed = [_parse(text) for text in overrides]
    for override in parsed:
        _check_choice(override)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra_compose("train", overrides=list(overrides))
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise _missing(str(error.full_key)) from None
    except OmegaConfBaseException as error:
        raise _unresolved(error) from None
    except (HydraException, ValueError) as error:
        raise _refused(parsed, error) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key not in _NOT_OURS}


def fitted(values: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Change what an elastic run must change on so many ranks, and say so; others stay.

    Raises:
        ConfigError: a value is illegal, or the ranks cannot share the global batch.
    """
    config = decode(values)
    for key, value in (refit(config, ranks) if config.launch.elastic else {}).items():
        section, name = key.split(".")
        print(f"{'elastic':<11}{key}: {values[section][name]} -> {value}", file=sys.stderr)
        values[section][name] = value
    return values


def groups() -> dict[str, list[str]]:
    """Return the choices of each group of `conf/`: the names of its files."""
    folders = sorted(path for path in CONF.iterdir() if path.is_dir())
    return {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folders}


def _parse(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        similar = nearest(key.lstrip("-+"))
        raise ConfigError(
            key,
            f"{text!r}, without a value",
            "key=value",
            f"write {similar or 'key'}=VALUE; options are --help and --cfg job",
        )
    if not key or key.lstrip("+~").startswith("hydra"):
        raise ConfigError(
            key or text,
            value,
            "a key of the configuration (hydra only composes it here)",
            "see `python train.py --help`; the run's folder is run.dir",
        )
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            key,
            value or text,
            f"a value that can be read ({str(error).splitlines()[0]})",
            f"quote it twice, for the shell and for us: '{key}=\"...\"'; lists are [a,b]",
        ) from None
    if override.is_sweep_override():
        raise ConfigError(
            key, value, "one value: a run is one configuration", "quote a comma, or start two runs"
        )
    return override


def _check_choice(override: Override) -> None:
    """Refuse the name of a group's file that does not exist."""
    group = override.key_or_group
    choices = groups().get(group)
    if choices is None or override.is_delete():
        return
    got = override.value()
    if got in choices or (group == "experiment" and got is None):
        return
    similar = difflib.get_close_matches(str(got), choices, n=1, cutoff=0.4)
    raise ConfigError(
        group,
        got,
        "one of " + (", ".join(choices) or f"the files of conf/{group}, which has none"),
        f"did you mean {group}={similar[0]}?"
        if similar
        else f"choose one, or add conf/{group}/{got}.yaml",
    )


def _missing(key: str) -> ConfigError:
    words, doc = next(((w, d) for name, w, d in keys() if name == key), ("a value", ""))
    return ConfigError(key, "nothing", words, f"set {key}=...: {doc}" if doc else f"set {key}=...")


def _unresolved(error: OmegaConfBaseException) -> ConfigError:
    return ConfigError(
        str(error.full_key or "?"),
        str(error).splitlines()[0],
        "a reference ${...} to a key that exists, or ${now:%Y%m%d}",
        "mend the reference, or put the value in its place",
    )


def _refused(overrides: Sequence[Override], error: Exception) -> ConfigError:
    """Find the override that hydra would not take, and say why."""
    known = {name for name, _, _ in keys()}
    said = str(error).splitlines()[0]
    named = [o for o in overrides if f"'{o.key_or_group}'" in said] or [
        o for o in overrides if o.key_or_group in said
    ]
    if not named:
        return ConfigError("conf/", said, "files that compose", "mend the file that is named")
    override = named[0]
    key, got = override.key_or_group, override.value()
    if key not in known and key not in groups():
        return unknown_key(key, "(removed)" if override.is_delete() else got)
    return ConfigError(key, override.input_line, f"key=value ({said})", f"write {key}={got}")
