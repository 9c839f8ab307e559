"""Write the pages of `frontier-llm train --help [KEY|GROUP|all]`.

The description of each key is the docstring of its field in frontier_llm/config. The description of
a choice is the comment at the top of its file in conf/.
"""

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.experiments import comments
from frontier_llm.cli.group_files import section_of
from frontier_llm.cli.package_files import conf_file
from frontier_llm.config import RunConfig
from frontier_llm.config.decode import keys
from frontier_llm.config.section import Section
from frontier_llm.config.synonyms import KEYS
from frontier_llm.errors import ConfigError
from frontier_llm.units import counted

_WIDTH = 100
"""Characters per line."""
_END_OF_SENTENCE = re.compile(r"(?<!\bal)\.(?=\s|$)")
_USAGE = """\
Train a GPT or an encoder-decoder model with tensor, pipeline and sharded data parallelism.

usage: frontier-llm train [key=value ...]            train
       frontier-llm train -m key=a,b [...]           the same as frontier-llm sweep
       frontier-llm train --cfg job [key=value ...]  print the configuration and stop
       frontier-llm train --help                     print this page
       frontier-llm train --help KEY|GROUP           describe a key, or a group and its keys
       frontier-llm train --help all                 describe all groups and keys

In a checkout, `python train.py` is the same as `frontier-llm train`.
Started by srun or torchrun, this command is one rank of a job. Otherwise it starts launch.ranks
processes on this machine.

examples
  frontier-llm train
      a small model on the Python files of the standard library; a process per GPU, or 4 on a CPU
  frontier-llm train data=text data.path=book.txt trainer.steps=500
      the same model on your own text
  frontier-llm train launch.ranks=8 parallel.tensor=2 parallel.pipeline=2 data.global_batch=32
      8 processes: tensor x pipeline x data = 2 x 2 x 2
  srun -N 2 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest \\
    .venv/bin/frontier-llm train experiment=frontier_22b
      16 ranks of a cluster

exit codes: 0 done, 2 the configuration is wrong, 3 stopped on request, 1 any other failure
"""
_MOST_USED = (
    "trainer.steps", "data.path", "data.global_batch", "data.sequence_length", "launch.ranks",
    "parallel.tensor", "parallel.pipeline", "optimizer.learning_rate", "checkpoint.every_steps",
    "run.dir",
)  # fmt: skip
"""The keys of the short page."""
_WITHOUT_SECTION = {
    "experiment": "All settings of a run, such as those of a paper.",
    "sweep": "A search: the experiment, the axes and their values.",
}
"""What the groups are whose files set keys of any section."""


def help_text(topics: Sequence[str] = ()) -> str:
    """Return the page of topics such as `checkpoint.keep`, `data` or `all`, or the short page."""
    known = {key: (key, kind, doc) for key, kind, doc in keys()}
    names, defaults, lines = [_current(topic, known) for topic in topics], compose([]), [_USAGE]
    in_full = "all" in names
    if in_full:
        names = ["", *(name for name in _sections() if "." not in name)]
    elif names:
        lines = []
    else:
        lines.append("keys that are used most: type (default)")
        for key in _MOST_USED:
            lines += _key(*known[key], defaults, in_full=False)
        lines += ["", *_groups(known)]
    for name in names:
        if name in known:
            lines += _key(*known[name], defaults, in_full=True)
        else:
            lines += _page(section_of(name), defaults, in_full=in_full)
    return "\n".join(lines).rstrip("\n")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether a command line has `--help`, `--help=KEY` or `-h`."""
    return bool({"--help", "-h"} & {argument.partition("=")[0] for argument in arguments})


def help_topics(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line that `--help` is to describe."""
    words = [argument.removeprefix("--help=") for argument in arguments]
    return [word for word in words if not word.startswith("-")]


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, with its period."""
    words = " ".join(text.split())
    end = _END_OF_SENTENCE.search(words)
    return words[: end.end()] if end else words


def _current(topic: str, known: Iterable[str]) -> str:
    """Return the key or group that a topic such as `data` or `data.path=x` stands for."""
    name = topic.partition("=")[0].lstrip("+~")
    topics = ["all", *groups(), *_sections(), *known]
    if name in topics:
        return name
    similar = [key for key in topics if key.rpartition(".")[2] == name]
    similar += [KEYS[last] for last in [name.rpartition(".")[2]] if last in KEYS]
    similar += [group for group, files in groups().items() if name in files]
    similar += difflib.get_close_matches(name, topics, n=1)
    todo = f"did you mean --help {similar[0]}?" if similar else "--help all describes all keys"
    raise ConfigError("--help", name, "a key, a group of keys, or all", todo)


def _sections(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, str]:
    """Return what the documentation says about each section, by dotted name."""
    found = {} if prefix else dict(_WITHOUT_SECTION)
    for name, field in section.model_fields.items():
        type_ = field.annotation
        if isinstance(type_, type) and issubclass(type_, Section):
            found[prefix + name] = f"{field.description}\n\n{type_.__doc__}"
            found |= _sections(type_, f"{prefix}{name}.")
    return found


def _groups(known: Iterable[str]) -> Iterator[str]:
    yield "groups: --help GROUP describes the keys; GROUP=FILE takes the values of a file of conf/"
    for name, text in _sections().items():
        if "." not in name:
            files = f" ({counted(len(groups()[name]), 'file')})" if name in groups() else ""
            yield f"  {name:<12} {first_sentence(text)}{files}"
    yield f"keys without a group: {', '.join(key for key in known if '.' not in key)}"


def _page(section: str, defaults: Mapping[str, Any], *, in_full: bool) -> Iterator[str]:
    """Yield the descriptions of a section, of its choices, and of the keys in it and below it.

    The name "" stands for the keys without a section. `in_full`: all sentences of each key, not
    only the first one.
    """
    sections = _sections()
    for name in (section, *(name for name in sections if name.startswith(f"{section}."))):
        yield name or "keys without a group"
        for paragraph in dict.fromkeys(sections.get(name, "").split("\n\n")):
            yield from _wrapped(paragraph, "  ")
        for group in (group for group in groups() if section_of(group) == name):
            yield f"  choices: {group}=NAME takes the values of conf/{group}/NAME.yaml"
            for choice in groups()[group]:
                summary = first_sentence(" ".join(comments(conf_file(group, choice))))
                yield from _wrapped(summary, " " * 25, f"    {choice:<20} ")
        for key, kind, doc in keys():
            if key.rpartition(".")[0] == name:
                yield from _key(key, kind, doc, defaults, in_full=in_full)
        yield ""


def _key(
    key: str, kind: str, doc: str, defaults: Mapping[str, Any], *, in_full: bool
) -> Iterator[str]:
    yield from _wrapped(f"{key}: {kind}{_default(key, defaults)}", " " * 4, "  ")
    yield from _wrapped(doc if in_full else first_sentence(doc), " " * 6)


def _wrapped(text: str, indent: str, first_indent: str | None = None) -> list[str]:
    """Return lines of _WIDTH characters, with `indent` in front of all of them but the first."""
    first = indent if first_indent is None else first_indent
    words = (first + " ".join(text.split())).rstrip()
    return textwrap.wrap(words, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _default(key: str, defaults: Mapping[str, Any]) -> str:
    """Return the default of a key in parentheses; nothing if it is long or in no file of conf/."""
    value: Any = defaults
    for part in key.split("."):
        if part not in value:
            return ""
        value = value[part]
    written = "null" if value is None else str(value)
    written = written.lower() if isinstance(value, bool) else written
    return f" ({written})" if len(written) <= 60 else ""
