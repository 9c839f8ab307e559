"""Compose the files of `conf/` and the command line into nested values, with hydra.

An override is an argument `key=value`. A group is a folder of `conf/`, such as `model`. The
override `model=gpt_22b` is a choice: it takes the values of conf/model/gpt_22b.yaml. Only one
process of a run composes, and sends the values to the others, because interpolations such as
`${now:}` would differ between processes. Every mistake in an override is a `ConfigError`.
"""

import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MissingMandatoryValue, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from frontier_llm.cli import machine_defaults  # also registers its resolvers
from frontier_llm.cli.file_mistakes import check_choices, refused_default, unreadable
from frontier_llm.cli.group_files import (
    bases,
    file_choices,
    file_values,
    in_quotes,
    key_of,
    placed,
    quoted,
    refuse_blanks,
    section_of,
    size_of,
)
from frontier_llm.cli.options import TRIAL_VARIABLE
from frontier_llm.cli.package_files import CONF, CONF_DIR_OPTION, conf_file, conf_folders
from frontier_llm.config.decode import decode, keys, leaves, nearest, unknown_key
from frontier_llm.config.needed import SWEEP, Need, unused
from frontier_llm.config.run import RunConfig
from frontier_llm.config.section import Section
from frontier_llm.config.synonyms import KEYS, nearest_value
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.elastic import changes_for, with_changes
from frontier_llm.saving import run_directory

OPTIONAL_GROUPS = ("experiment", "sweep")
"""Groups of which no file is chosen by default. Their files set keys of any section."""
_NOT_KEYS = ("hydra", *OPTIONAL_GROUPS)
"""Top-level keys of the composed values that are not sections of the configuration."""
_EXPERIMENT = "put the file in DIR/experiment/NAME.yaml, and write --conf-dir DIR experiment=NAME"
_OPTIONS = {
    "--config": _EXPERIMENT, "--config-name": _EXPERIMENT, "--config-file": _EXPERIMENT,
    "--job.config_file": "read a file of torchtitan with frontier-llm plan --from FILE",
    "--deepspeed": "read a file of DeepSpeed with frontier-llm plan --from FILE, or write "
    "sharding=zero3",
    "--dry-run": "write plan=dry_run, or frontier-llm dry-run for a job that is not started here",
    "--deepspeed_config": "read a file of DeepSpeed with frontier-llm plan --from FILE",
}  # fmt: skip
"""What to do instead of options of other programs that name a file."""


class ConfDirSearchPath(SearchPathPlugin):
    """Prepend the directory of `--conf-dir` to hydra's search path.

    Hydra's own setting `hydra.searchpath` does not suffice, because hydra searches such directories
    after `conf/`, and a file of the user could not replace a file of the same name in `conf/`.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path; hydra calls this whenever it composes."""
        for folder in conf_folders()[:-1]:
            search_path.prepend(provider=CONF_DIR_OPTION, path=f"file://{folder}")


Plugins.instance().register(ConfDirSearchPath)


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose `conf/train.yaml` with overrides such as `model=gpt_22b` or `trainer.steps=9`.

    Returns nested plain dictionaries with all interpolations resolved. Types are not checked here
    but by frontier_llm.config.decode. `cluster.device.memory_gib` is at most what the driver gives
    to this machine's GPU, if that is the GPU of the cluster.
    """
    overrides = [_quoted_path(placed(text)) for text in overrides]
    parsed = [_parse(overrides, index) for index in range(len(overrides))]
    try:
        known = groups()
        for override in parsed:
            _check_choice(override, known)
        _check_experiment(parsed, known)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra_compose("train", overrides=overrides, return_hydra_config=True)
        chosen = composed.hydra.runtime.choices
        with open_dict(composed):
            del composed["hydra"]
        check_choices(composed, chosen, known)
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (YAMLError, UnicodeDecodeError) as error:
        raise unreadable(error) from None
    except MissingMandatoryValue as error:
        raise _missing(parsed, str(error.full_key)) from None
    except OmegaConfBaseException as error:
        raise _unresolved(parsed, error) from None
    except (HydraException, ValueError) as error:
        raise _refused(parsed, error) from None
    assert isinstance(values, dict)
    sections = {str(key): value for key, value in values.items() if key not in _NOT_KEYS}
    machine_defaults.limit_memory(sections.get("cluster"))
    _check_allowed(sections)
    return _in_order(sections)


def _quoted_path(override: str) -> str:
    """Quote the value of an override if it looks like a path that hydra cannot read unquoted.

    Such paths have a `~`, brackets, quotes or letters like é; a shell replaces only a leading `~`.
    """
    key, _, value = override.partition("=")
    is_path = value.startswith(("~", "/", "./", "../")) or not value.isascii()
    if not is_path or value == "~" or value.startswith(("[", "{", '"', "'")):
        return override
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return f"{key}={in_quotes(value)}"
    return override


def _in_order(values: Mapping[str, Any], section: type[Section] = RunConfig) -> dict[str, Any]:
    """Return nested values in the order in which the types of the configuration declare them."""
    fields = section.model_fields
    ordered: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: [*fields, name].index(name)):
        value = values[name]
        type_ = fields[name].annotation if name in fields else None
        if isinstance(type_, type) and issubclass(type_, Section) and isinstance(value, Mapping):
            value = _in_order(value, type_)
        ordered[name] = value
    return ordered


@dataclass(frozen=True)
class Composed:
    """A configuration, decoded once, and the values from which it was decoded."""

    values: Mapping[str, Any]
    config: RunConfig

    @classmethod
    def of(cls, overrides: Sequence[str]) -> "Composed":
        """Compose and decode."""
        values = compose(overrides)
        return cls(values, decode(values))

    def fitted(self, ranks: int) -> "Composed":
        """Fit micro-batch and sharding factors to a number of ranks, if launch.elastic=true.

        An elastic run may resume on another number of ranks. Each change is printed.
        """
        values, changed = dict(self.values), changes_for(self.config, ranks)
        for key, value in changed.items():
            section, name = key.split(".")
            print(f"{'elastic':<11}{key}: {values[section][name]} -> {value}", file=sys.stderr)
            values[section] = values[section] | {name: value}
        return Composed(values, with_changes(self.config, changed))

    def to_yaml(self, chosen: RunConfig) -> str:
        """Return the values as YAML, with what was chosen for `auto`, which all ranks share."""
        names = {"schedule", "waiting_weights", "layers_per_stage", "context"}
        parallel = chosen.parallel.model_dump(mode="json", include=names)
        sharding = chosen.sharding.model_dump(include={"params", "grads", "optimizer"})
        keys = {"parallel": parallel, "sharding": sharding}
        changed = {section: self.values[section] | found for section, found in keys.items()}
        return run_directory.to_yaml({**self.values, **changed})


def groups() -> dict[str, list[str]]:
    """Return the names of the files of each group, in `conf/` and in the user's `--conf-dir`."""
    found: dict[str, set[str]] = {}
    for folder in conf_folders():
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


def _parse(words: Sequence[str], index: int) -> Override:
    """Parse one of the overrides; the words around it tell how the shell has split a value."""
    refuse_blanks(words, index)
    text, following = words[index], words[index + 1 :]
    key, equals, value = text.partition("=")
    if not text.startswith("~") and (not equals or key.startswith("--")):
        raise _no_override(words[:index], text, following)
    if not key or key.lstrip("+~").startswith("hydra"):
        wants = "a key of the configuration: settings of hydra itself have no effect here"
        todo = "see `frontier-llm train --help` for all keys; the run directory is run.dir"
        raise ConfigError(key or text, value, wants, todo)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        wants = "a value that can be read: a list [a,b], entries {name: a}, or a text, in quotes "
        wants += "if it has brackets, commas, quotes, = or letters such as é"
        todo = f"quote the value: {quoted(key, value, following)}"
        raise ConfigError(key, value or text, wants, todo) from None
    if override.is_sweep_override():
        name = override.key_or_group
        if name not in groups() and not any(f"{name}.".startswith(f"{k}.") for k, _, _ in keys()):
            raise unknown_key(name, value)
        wants = "one value: a run is one configuration"
        todo = "quote the value if it contains a comma; start two runs, or a sweep with -m"
        raise ConfigError(key, value, wants, todo)
    return override


def _no_override(before: Sequence[str], text: str, following: Sequence[str]) -> ConfigError:
    """Build the error for an option, or a word without a value; the key may be another program's.

    The value of an option may be the word that follows it, and a word a part of the value before.
    """
    key, equals, value = text.partition("=")
    similar = nearest(key.lstrip("-+"))
    got = value if equals else f"{text!r}, without a value"
    if option := _OPTIONS.get(key):
        return ConfigError(key, got, "key=value, without dashes", option)
    if not key.startswith("--"):
        todo = f"write {similar or 'key'}=VALUE; options are --help and --cfg job"
        is_key = key in KEYS or key.partition(".")[0] in RunConfig.model_fields
        if before and (not similar or ("/" in before[-1] and not is_key)):
            name, _, first = before[-1].partition("=")
            rest = takewhile(lambda word: "=" not in word, following)
            todo = f"if it belongs to {name}, write {quoted(name, ' '.join([first, text, *rest]))}"
        elif Path(text).exists():
            todo = f"write data=text {shlex.quote(f'data.path={text}')}"
        elif group := next((group for group, names in groups().items() if text in names), None):
            todo = f"write {section_of(group)}={text}"
        return ConfigError(key, got, "key=value", todo)
    if not equals:
        value = next((word for word in following[:1] if "=" not in word), "VALUE")
    setting = similar or key.lstrip("-+")
    setting += "" if "=" in setting else f"={value}"
    todo = f"write {setting}" + ("" if equals else "; options are --help and --cfg job")
    return ConfigError(key, got, "key=value, without dashes", todo)


def _check_choice(override: Override, known: Mapping[str, Sequence[str]]) -> None:
    group = override.key_or_group
    choices = known.get(group)
    section = section_of(group)
    if override.is_delete() and section in RunConfig.model_fields:
        todo = f"leave {override.input_line} out"
        todo += f", or choose {section}=NAME: {', '.join(choices)}" if choices else ""
        wants = "to keep all sections: a run needs each of them"
        raise ConfigError(section, f"{override.input_line}, which removes it", wants, todo)
    if choices is None or override.is_delete():
        return
    got = override.value()
    if group in OPTIONAL_GROUPS and got in choices:
        file = conf_file(group, str(got))
        if not re.search(r"^# *@package +_global_ *$", file.read_text(), re.MULTILINE):
            wants = f"`# @package _global_` as its first line: files of {group}/ have whole keys"
            raise ConfigError(group, f"{file}, without this line", wants, "add the line at its top")
    if got in choices or (group in OPTIONAL_GROUPS and got is None):
        return
    meant = nearest_value(section, got, choices)
    todo = f"did you mean {section}={meant}?" if meant else ""
    todo = todo or f"choose one, or add conf/{group}/{got}.yaml"
    if group == "data" and (Path(str(got)).exists() or re.search(r"[./]", str(got))):
        todo = f"write data=text {shlex.quote(f'data.path={got}')}"
    if group == "model":
        todo += " Published weights are converted first: frontier-llm convert --help"
    raise ConfigError(
        section,
        got,
        "one of " + (", ".join(choices) or f"the files of conf/{group}, which has none"),
        todo,
    )


def _check_experiment(overrides: Sequence[Override], known: Collection[str]) -> None:
    """Refuse a choice whose values the chosen experiment would replace silently.

    With `experiment=E sharding=S`, hydra prefers the values of E to those of S. If both set the
    same key to different values, the command line must give the value. The experiments of `conf/`
    set no key that a file of another group sets. A user's own experiments may. A file of
    `conf/sweep` may choose the experiment.
    """
    chosen = {o.key_or_group: o.value() for o in overrides if o.key_or_group in known}
    of_sweep = file_choices("sweep", str(chosen.pop("sweep"))) if chosen.get("sweep") else {}
    experiment = chosen.pop("experiment", None) or of_sweep.get("experiment")
    if experiment is None:
        return
    given_keys = [o.key_or_group for o in overrides if "." in o.key_or_group]
    of_experiment = dict(leaves(file_values("experiment", str(experiment))))
    for group, name in chosen.items():
        for key, value in leaves(file_values(group, str(name)), f"{section_of(group)}."):
            is_given = any(key == given or key.startswith(f"{given}.") for given in given_keys)
            if of_experiment.get(key, value) != value and not is_given:
                raise ConfigError(
                    group,
                    f"{name}, whose {key}={value} experiment={experiment} overrides",
                    "a key that is set by the experiment or by the chosen file, not by both",
                    f"add {key}={value} for the value of {group}={name}, or "
                    f"{key}={of_experiment[key]} for the value of the experiment; or take the key "
                    f"out of experiment {experiment}",
                )


def _check_allowed(sections: Mapping[str, Any]) -> None:
    """Refuse names in `run.allow_changes` that no key or section has."""
    allowed = (sections.get("run") or {}).get("allow_changes")
    for name in map(str, allowed) if isinstance(allowed, list) else ():
        # keys within a key are those of a map, such as optimizer.rate_factors.embedding
        pairs = ((f"{key}.", f"{name}.") for key, _, _ in keys())
        if not any(key.startswith(given) or given.startswith(key) for key, given in pairs):
            wants = "keys or sections that `frontier-llm train --help` lists"
            raise ConfigError("run.allow_changes", name, wants, unknown_key(name, name).todo)


def _missing(overrides: Sequence[Override], key: str) -> ConfigError:
    """Build the error for a key without a value: a base file, or a file that lacks the key."""
    wanted = next((kind for name, kind, _ in keys() if name == key), "a value")
    group, _, name = key.partition(".")
    choices = {override.key_or_group: str(override.value()) for override in overrides}
    if experiment := choices.get("experiment"):
        choices = file_choices("experiment", experiment) | choices
    chosen = choices.get(group, "")
    files = [file for file in groups().get(group, ()) if chosen in bases(group, file)]
    complete = [file for file in files if file_values(group, file).get(name, "???") != "???"]
    complete.sort(key=lambda file: (not file.startswith(f"{chosen}_"), size_of(group, file)))
    if not complete:
        path = conf_file(group, chosen)
        got = f"nothing: {path} does not set it" if path.exists() else "nothing"
        return ConfigError(key, got, wanted, f"set {key}=VALUE")
    got = f"{chosen}, a base file: it holds what other files share, and leaves {key} open"
    wanted = f"a complete file that builds on it: {', '.join(complete)}"
    todo = f"choose one, such as {group}={complete[0]}, or set {key}=VALUE and what else is open"
    return ConfigError(group, got, wanted, todo)


def _unresolved(overrides: Sequence[Override], error: OmegaConfBaseException) -> ConfigError:
    """Build the error for a reference `${...}` that cannot be resolved."""
    message = str(error).splitlines()[0]
    for key in (name for name, _, _ in keys() if f"'{name}' not found" in message):
        return _missing(overrides, key)
    wants = "a reference ${...} to a key that exists, or ${now:%Y%m%d}"
    todo = "correct the reference, or write the value itself"
    return ConfigError(str(error.full_key or "?"), message, wants, todo)


def _refused(overrides: Sequence[Override], error: Exception) -> ConfigError:
    """Build the error for the override that hydra refused and that its message names."""
    known = {name for name, _, _ in keys()}
    lines = str(error).splitlines()
    message = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    in_quotes = [o for o in overrides if f"'{o.key_or_group}'" in message]
    named = in_quotes or [o for o in overrides if o.key_or_group in message]
    for override in overrides:
        if override.key_or_group in groups() and isinstance(override.value(), str):
            found = refused_default(override.key_or_group, str(override.value()), groups())
            if found is not None:
                return found
    if not named:
        return ConfigError(
            "conf/", message, "files that compose", "correct the file that the message names"
        )
    override = named[0]
    key, got = override.key_or_group, override.value()
    if key not in known and key not in groups():
        return unknown_key(key, "(removed)" if override.is_delete() else got)
    if key in groups():
        todo = f"correct the file {got}.yaml of conf/{key} or --conf-dir"
        return ConfigError(key, got, f"a file that composes ({message})", todo)
    todo = f"leave {override.input_line} out" if override.is_delete() else f"write {key}={got}"
    return ConfigError(key, override.input_line, f"key=value ({message})", todo)


def configured(overrides: Sequence[str], searched: Collection[str] = ()) -> Composed:
    """Compose and decode a command line, and refuse what it sets without effect.

    A key counts as set if the command line or the chosen experiment gives it another value than it
    would have otherwise. Values of other files of conf/ are not refused, nor is the trial of a
    sweep, because a grid has trials in which one key makes another one idle. Raises a ConfigError
    if an override is wrong, or a key that is set has no effect.

    Args:
        searched: sections whose keys the command varies itself, such as `parallel` for a planner.
            Keys in them, and keys that need a setting in them, are not refused.
    """
    values = compose(overrides)
    config = decode(values, partial(_usual, overrides))
    if TRIAL_VARIABLE in os.environ:
        return Composed(values, config)
    given = {key_of(word): word for word in overrides}
    # job scripts put a default of run.dir before the user's
    for word in (w for w in overrides if w != given[key_of(w)] and not w.startswith("run.")):
        print(f"warning    {word} is replaced by {given[key_of(word)]}", file=sys.stderr)
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
            if differs(rest, key, values):
                needed = {key_of(word): word for word in need.setting.split()}
                others = [given[k] for k in needed if given.get(k, needed[k]) != needed[k]]
                todo = f"leave {key} out, or write {_setting(need, given.get('data', ''))}"
                todo += f" instead of {' '.join(others)}" if others else ""
                raise _without_effect(key, _value(values, key), need, todo)
    if experiment := given.get("experiment", "").partition("=")[2]:
        _check_idle_keys(experiment, idle)
    return Composed(values, config)


def _setting(need: Need, data: str) -> str:
    """Return what a key needs; a text gets the objective of the chosen standard library."""
    if need.setting == "data=text" and "=stdlib" in data:
        return data.replace("=stdlib", "=text")
    return need.setting


def _check_idle_keys(name: str, idle: Collection[str]) -> None:
    """Refuse keys of an experiment's file that have no effect in the experiment itself either."""
    own = {key for key, _ in leaves(file_values("experiment", name))}
    if not own & set(idle):
        return
    values = compose([f"experiment={name}"])
    choices = [f"{group}={file}" for group, file in file_choices("experiment", name).items()]
    for key, need in unused(decode(values)):
        if key in own & set(idle) and need.setting != SWEEP and differs(choices, key, values):
            todo = f"choose {need.setting} in experiment {name}, or take {key} out of it"
            raise _without_effect(key, _value(values, key), need, todo)


def gives(overrides: Sequence[str], key: str) -> bool:
    """Return whether the command line or the experiment that it chooses sets a key."""
    given = {key_of(word): word.partition("=")[2] for word in overrides}
    experiment = given.get("experiment")
    in_file = leaves(file_values("experiment", experiment)) if experiment else ()
    return key in given or key in dict(in_file)


def differs(overrides: Sequence[str], key: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key has another value without the override that sets it."""
    try:
        return bool(_value(compose(overrides), key) != _value(values, key))
    except ConfigError:  # the other overrides need this one
        return True


def _usual(overrides: Sequence[str], key: str) -> Any:
    """Return the value of a key without the overrides that set it; None if they need these."""
    try:
        rest = [word for word in overrides if key_of(word) != key]
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
