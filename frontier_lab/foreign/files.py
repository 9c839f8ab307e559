"""Read the file of another program's run; its format is found by its content."""

import json
import re
import shlex
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frontier_lab.foreign import deepspeed_json, megatron_arguments, torchtitan_toml
from frontier_lab.foreign.foreign_run import ForeignRun, flat
from frontier_llm.cli.group_files import file_values
from frontier_llm.cli.package_files import conf_file
from frontier_llm.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_FILE = 2**18
"""Bytes of the largest script, TOML or JSON file that is read."""
LARGEST_LOG = 2**24
"""Bytes of a log in which its arguments are looked for."""
MOST_UNDECIDED = 6
"""Largest number of open conditions of a script that are shown."""
FORMATS = (
    "a script or a log with the arguments of Megatron-LM, a torchtitan TOML file, or a DeepSpeed "
    "JSON file"
)
MODEL_CONFIG = "config.json"
_ARGUMENT = re.compile(r"^[ \t]*(?:export )?\w+=[\"']?\$\{?[1-9]", re.MULTILINE)
_NEOX = re.compile(r"^[ \t]*[\"']?(?:pipe|model)[-_]parallel[-_]size[\"']?[ \t]*:", re.MULTILINE)


def started(command: str) -> tuple[Path, dict[str, list[str]]]:
    """Return the file and the variables of a command such as `NODES=4 run.sh 8B`.

    The script's arguments are variables by number.
    """
    if Path(command).exists() or " " not in command.strip():
        return Path(command), {}
    try:
        words = shlex.split(command)
    except ValueError as error:
        wants = "a file, or the command that starts a script"
        raise ConfigError("--from", command, f"{wants} ({error})", "correct it") from None
    variables: dict[str, list[str]] = {}
    while words and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        variables[found[1]] = [found[2]]
        words = words[1:]
    while len(words) > 1 and (words[0] in ("bash", "sh", "sbatch") or words[0].startswith("-")):
        words = words[1:]
    numbered = {str(index): [word] for index, word in enumerate(words)}
    both = {"@": words[1:], "*": words[1:], "#": [str(len(words[1:]))]}
    return Path(words[0] if words else command), {**variables, **numbered, **both}


def read_run(
    path: Path,
    model_config: Path | None,
    given: Mapping[str, str],
    variables: Mapping[str, list[str]] | None = None,
) -> ForeignRun:
    """Read a run; overrides of the command line are `given` by key.

    `variables` are those of a script's environment and, by number, its arguments.

    Raises:
        ConfigError: the file cannot be read or understood.
    """
    text = _read(path, "--from")
    ranks = _given_ranks(given)
    if found := megatron_arguments.DUMP.search(text):
        values = megatron_arguments.read_dump(text, found[1])
        if "num_layers" in values and "micro_batch_size" in values:
            return megatron_arguments.read_arguments(values, path.name, given, ranks, dumped=True)
    if len(text) > LARGEST_FILE:
        raise _unknown(path, f"more than {LARGEST_FILE} bytes, and no arguments of Megatron-LM")
    if _NEOX.search(text):
        raise _unknown(path, "a configuration of GPT-NeoX, which is not read")
    content, problem = _parsed(text)
    if content is not None:
        if deepspeed_json.is_deepspeed(content):
            model = _model(path, model_config)
            return deepspeed_json.read_deepspeed(content, model, path.name, given, ranks)
        if torchtitan_toml.is_torchtitan(content):
            return torchtitan_toml.read_job(dict(flat(content)), path.name, given, ranks)
        raise _unknown(path, "keys " + (", ".join(map(str, content))[:200] or "(none)"))
    if problem is None and megatron_arguments.is_megatron(text, path.parent):
        values, undecided = megatron_arguments.read_commands(text, variables or {}, path.parent)
        run = megatron_arguments.read_arguments(values, path.name, given, ranks, dumped=False)
        has_arguments = _ARGUMENT.search(text) and not (variables and "@" in variables)
        _note_undecided(run, undecided, path.name, bool(has_arguments))
        return run
    raise _unknown(path, problem or _kind(path, text))


def _note_undecided(run: ForeignRun, undecided: list[str], name: str, has_arguments: bool) -> None:
    """Note what a script leaves open, and how to give it."""
    if undecided:
        shown = "; ".join(undecided[:MOST_UNDECIDED])
        more = len(undecided) - MOST_UNDECIDED
        rest = f"; and {more} more" if more > 0 else ""
        run.notes.append(f"not known here, so what depends on it is left out: {shown}{rest}")
    if run.missing or not all(re.search(r"\[ -[def] ", each) for each in undecided):
        if has_arguments:
            how = f"--from '{name} ARGUMENT ...'"
            run.notes.append(f"the script has arguments; give them as to the shell: {how}")
        elif undecided or "$" in " ".join(run.missing.values()):
            run.notes.append(f"give variables as to the shell: --from 'NAME=VALUE ... {name}'")


def _kind(path: Path, text: str) -> str:
    """Return what a file seems to be."""
    kinds = {".yaml": "a YAML file", ".yml": "a YAML file", ".py": "a Python program"}
    if path.suffix in kinds:
        return f"{kinds[path.suffix]}, which is not read"
    sources = re.findall(r"^[ \t]*(?:source|\.)[ \t]+(\S{1,200})", text, re.MULTILINE)
    if text.startswith("#!") or sources:
        names = f"; it sources {', '.join(sources)[:200]}" if sources else ""
        return f"a script that names no arguments of Megatron-LM itself{names}"
    return f"{len(text)} characters of another kind"


def _unknown(path: Path, got: str) -> ConfigError:
    todo = "name such a file; the log of a run of Megatron-LM has all of its arguments"
    return ConfigError(f"--from {path.name}", got, FORMATS, todo)


def _read(path: Path, option: str) -> str:
    """Return the text of a regular file, at most LARGEST_LOG bytes of it."""
    wants, todo = "a text file that can be read", "name another file"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(option, path, f"{wants}; this is no regular file", todo)
        with path.open("rb") as file:
            content = file.read(LARGEST_LOG)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(option, path, f"{wants} ({reason})", todo) from None
    if not content.strip():
        raise ConfigError(option, f"{path}, which is empty", FORMATS, todo)
    text = content.decode("utf-8-sig", "replace")
    is_text = "\0" not in text and "\ufffd" not in text
    if not is_text and not megatron_arguments.DUMP.search(text):  # logs may have other bytes
        raise ConfigError(option, f"{path}, which has bytes that are no text", FORMATS, todo)
    return text


def _parsed(text: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the content of a JSON or TOML file; or None, and what is wrong with JSON, if it is."""
    if text.lstrip()[:1] == "{":
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            return None, f"JSON with a mistake: {error}"
        return values, None
    try:
        return tomllib.loads(text), None
    except (ValueError, RecursionError) as error:
        is_toml = any(line.startswith(("[model]", "[training]")) for line in text.splitlines())
        return None, f"TOML with a mistake: {error}" if is_toml else None


def _model(path: Path, model_config: Path | None) -> dict[str, Any] | None:
    """Return the content of the model's config.json, which may lie beside the file."""
    beside = path.with_name(MODEL_CONFIG)
    if model_config is None and not (beside.is_file() and beside != path):
        return None
    file = model_config or beside
    values, problem = _parsed(_read(file, "--model-config"))
    if values is None or "model_type" not in values:
        got = f"{file}: {problem or 'no model_type'}"
        wants = "the config.json of a Hugging Face model"
        raise ConfigError("--model-config", got, wants, "name another file")
    return values


def _given_ranks(given: Mapping[str, str]) -> int | None:
    """Return the number of ranks of the command line; None if it gives none."""
    nodes = given.get("planner.nodes") or given.get("launch.nodes")
    if nodes is None:
        return _count(given, "launch.ranks") if "launch.ranks" in given else None
    nodes_key = "planner.nodes" if given.get("planner.nodes") else "launch.nodes"
    count = _count({nodes_key: nodes.strip("[]")}, nodes_key)
    if "launch.ranks_per_node" in given:
        return count * _count(given, "launch.ranks_per_node")
    cluster = given.get("cluster", "")
    if not cluster or not conf_file("cluster", cluster).is_file():
        return None  # composing the configuration gives the error
    each = file_values("cluster", cluster).get("ranks_per_node")
    return count * each if isinstance(each, int) else None


def _count(given: Mapping[str, str], key: str) -> int:
    if not given[key].isdecimal() or not 0 < int(given[key][:12]) < 10**7:
        raise ConfigError(key, given[key], "a whole number from 1 on", "correct it")
    return int(given[key])
