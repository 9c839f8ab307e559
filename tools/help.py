"""The text of `python train.py --help`: every key, from the configuration's own documentation."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from frontier_llm.config.decode import keys
from tools.compose import CONF, compose, groups

_WIDTH = 100
_INTRODUCTION = """\
Train a GPT or encoder-decoder model in tensor, pipeline and sharded data parallelism.

usage: python train.py [key=value ...]            train
       python train.py -m key=a,b [...]           sweep: run every point of a grid
       python train.py --cfg job [key=value ...]  print the configuration and stop
       python train.py --help                     print this page

Alone it starts launch.ranks processes on this machine; under srun or torchrun it is one rank.

examples
  python train.py
      a small model on the standard library's own Python, on 4 processes
  python tools/plan.py model=gpt_22b cluster=frontier_mi250x planner.nodes=16 data.global_batch=640
      what fits a cluster and is fastest, said without a GPU (docs/planner.md)
  python train.py launch.ranks=8 parallel.tensor=2 parallel.pipeline=2 data.global_batch=32
      8 processes: tensor x pipeline x data = 2 x 2 x 2
  srun -N 2 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest \\
    .venv/bin/python train.py experiment=frontier_22b
      16 ranks of a cluster
  python train.py -m parallel.tensor=1,2 data.micro_batch=1,2
      4 short runs, one after the other; tools/sweep_report.py compares them

exit codes: 0 done, 2 the configuration is wrong, 3 stopped on request, 1 anything else
"""


def help_text() -> str:
    """Write the page: what it does, the choices of each group, and every key with its default."""
    return "\n".join([_INTRODUCTION, *_choices(), *_keys(compose([]))])


def _choices() -> Iterator[str]:
    yield "choices: group=name takes the values of a file in conf/"
    for group, names in groups().items():
        yield f"  {group}"
        for name in names:
            yield f"    {name:<20} {_first_comment(group, name)}".rstrip()
    yield ""


def _first_comment(group: str, name: str) -> str:
    """Return the first comment of a file that says something to people."""
    for line in (CONF / group / f"{name}.yaml").read_text().splitlines():
        text = line.lstrip("# ")
        if line.startswith("#") and not text.startswith("@package"):
            return text
    return ""


def _keys(defaults: Mapping[str, Any]) -> Iterator[str]:
    yield "keys: type (default)"
    section = None
    for key, words, doc in keys():
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            yield ""
        yield f"  {key}: {words}{_default(key, defaults)}"
        yield textwrap.fill(doc, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default(key: str, defaults: Mapping[str, Any]) -> str:
    value: Any = defaults
    for part in key.split("."):
        value = value[part]
    written = (
        "null"
        if value is None
        else str(value).lower()
        if value is True or value is False
        else str(value)
    )
    return f" ({written})" if len(written) <= 60 else ""
