"""Write the text of `frontier-llm train --help`.

The description of each key is the docstring of its field in frontier_llm/config.
"""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.package_files import conf_file
from frontier_llm.config import RunConfig
from frontier_llm.config.decode import keys
from frontier_llm.config.section import Section

_WIDTH = 100
"""Characters per line."""
_INTRODUCTION = """\
Train a GPT or an encoder-decoder model with tensor, pipeline and sharded data parallelism.

usage: frontier-llm train [key=value ...]            train
       frontier-llm train -m key=a,b [...]           the same as frontier-llm sweep
       frontier-llm train --cfg job [key=value ...]  print the configuration and stop
       frontier-llm train --help                     print this page

In a checkout, `python train.py` is the same as `frontier-llm train`.
Started by srun or torchrun, this command is one rank of a job. Otherwise it starts launch.ranks
processes on this machine.

examples
  frontier-llm train
      a small model on the Python files of the standard library; a process per GPU, or 4 on a CPU
  frontier-llm plan model=gpt_22b cluster=frontier_mi250x planner.nodes=16 data.global_batch=640
      predict without a GPU which layouts fit a cluster and how fast they are (docs/planner.md)
  frontier-llm train launch.ranks=8 parallel.tensor=2 parallel.pipeline=2 data.global_batch=32
      8 processes: tensor x pipeline x data = 2 x 2 x 2
  srun -N 2 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest \\
    .venv/bin/frontier-llm train experiment=frontier_22b
      16 ranks of a cluster
  frontier-llm sweep parallel.tensor=1,2 data.micro_batch=1,2
      4 short runs, one after the other; frontier-llm sweep-report compares them

exit codes: 0 done, 2 the configuration is wrong, 3 stopped on request, 1 any other failure
"""


def help_text() -> str:
    """Return the page: the usage, the choices of each group, and every key with its default."""
    return "\n".join([_INTRODUCTION, *_choices(), *_keys(compose([]))])


def _choices() -> Iterator[str]:
    yield "choices: group=name uses the file GROUP/NAME.yaml of conf/ or of --conf-dir"
    for group, names in groups().items():
        yield f"  {group}"
        for name in names:
            yield f"    {name:<20} {_first_comment(group, name)}".rstrip()
    yield ""


def _first_comment(group: str, name: str) -> str:
    """Return the first comment of a file that is not an instruction to hydra."""
    for line in conf_file(group, name).read_text().splitlines():
        text = line.lstrip("# ")
        if line.startswith("#") and not text.startswith("@package"):
            return text
    return ""


def _keys(defaults: Mapping[str, Any]) -> Iterator[str]:
    yield "keys: type (default)"
    section: str | None = None
    described = {""}  # sections whose description has been written
    for key, kind, doc in keys():
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            yield ""
            yield section or "keys without a section"
            if section not in described:
                yield from _description(section)
            described.add(section)
        yield f"  {key}: {kind}{_default(key, defaults)}"
        yield textwrap.fill(doc, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _description(section: str) -> Iterator[str]:
    """Yield the documentation of a section, wrapped."""
    section_type: type[Section] = RunConfig
    for name in filter(None, section.split(".")):
        annotation = section_type.model_fields[name].annotation
        assert isinstance(annotation, type)
        section_type = annotation
    for paragraph in (section_type.__doc__ or "").split("\n\n"):
        text = " ".join(paragraph.split())
        yield textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _default(key: str, defaults: Mapping[str, Any]) -> str:
    """Return the default of a key in parentheses; nothing if it is long or in no file of conf/."""
    value: Any = defaults
    for part in key.split("."):
        if part not in value:
            return ""
        value = value[part]
    written = (
        "null"
        if value is None
        else str(value).lower()
        if value is True or value is False
        else str(value)
    )
    return f" ({written})" if len(written) <= 60 else ""
