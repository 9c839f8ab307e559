"""Run the program `frontier-llm`: find the command that the first argument names, and call it."""

import difflib
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from frontier_llm import __version__
from frontier_llm.cli.options import THE_LINE, path, refuse_search, run_command
from frontier_llm.cli.package_files import CONF, CONF_DIR_OPTION, CONF_DIR_VARIABLE
from frontier_llm.errors import ConfigError
from frontier_llm.launch.user_folders import redirect_libraries


class Command(NamedTuple):
    """A module whose `main(arguments)` returns the exit code, and the help of the command."""

    package: str
    module: str
    summary: str


CLI, STUDIES, SWEEPS = "frontier_llm.cli", "frontier_lab.commands", "frontier_lab.sweeps"
JOBS = "frontier_lab.jobs"
COMMANDS = {
    "train": Command(CLI, "train", "train a model on this machine, or be one rank of a job"),
    "plan": Command(STUDIES, "plan", "predict which layouts fit a cluster and how fast they are"),
    "goodput": Command(
        STUDIES, "goodput", "simulate failures: effective time, checkpoint interval"
    ),
    "launch": Command(JOBS, "launch", "print or submit the Slurm job of an experiment"),
    "doctor": Command(STUDIES, "doctor", "examine this machine and test every process group"),
    "preprocess": Command(STUDIES, "preprocess", "tokenize text into a corpus"),
    "sweep": Command(SWEEPS, "sweep", "run short trials over a grid or a search"),
    "sweep-report": Command(SWEEPS, "sweep_report", "compare the trials of a sweep"),
    "funnel": Command(SWEEPS, "funnel", "choose hyper-parameters on small models for large ones"),
    "report": Command(STUDIES, "report", "write a run's report.html again"),
    "generate": Command(STUDIES, "generate", "sample text from a run"),
    "evaluate": Command(STUDIES, "evaluate", "compute the validation loss of a checkpoint"),
    "convert": Command(STUDIES, "convert", "convert weights to and from Hugging Face"),
    "inspect": Command(
        STUDIES, "inspect_checkpoint", "list, verify, compare or export a checkpoint"
    ),
    "inspect-data": Command(STUDIES, "inspect_data", "show the samples that a run reads"),
    "explain-layout": Command(
        STUDIES, "explain_layout", "draw which rank holds which model states"
    ),
    "dry-run": Command(STUDIES, "dry_run", "build every stage of an experiment without memory"),
    "calibrate": Command(STUDIES, "calibrate", "measure this machine for the planner"),
}


def load(name: str) -> ModuleType:
    """Import the module of a command; frontier_lab is imported only by these names."""
    command = COMMANDS[name]
    return import_module(f"{command.package}.{command.module}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of this process or of `arguments`; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    return run_command(lambda: _dispatch(given))


def _dispatch(given: Sequence[str]) -> int:
    """Answer `--help` and `--version`, or import and call the module of the command."""
    arguments = take_conf_dir(given)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"frontier-llm {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        todo = f"did you mean frontier-llm {similar[0]}?" if similar else "see frontier-llm --help"
        raise ConfigError(THE_LINE, name, "a command: " + ", ".join(COMMANDS), todo)
    try:
        Path.cwd()
    except OSError:
        todo = "cd to a folder that exists"
        raise ConfigError("the working folder", "a removed folder", "a folder", todo) from None
    sys.argv = [f"frontier-llm {name}", *rest]  # argparse shows this name in its help
    refuse_search(name, rest)
    redirect_libraries(os.environ)
    gc.disable()  # it would scan all modules again and again, and find nothing
    module = load(name)
    gc.enable()
    return int(module.main(rest))


def prepare_streams() -> None:
    """Let closed standard streams, as of `>&-`, read and write nothing; escape what has no code.

    Otherwise the next files get their numbers, and output of libraries lands in a checkpoint.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))
        if isinstance(stream := getattr(sys, name), TextIOWrapper):  # not in some tests
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":  # unknown; rich would print nothing
        del os.environ["COLUMNS"]


def take_conf_dir(given: Sequence[str]) -> list[str]:
    """Remove `--conf-dir DIR` from the arguments, wherever it is; return the other arguments.

    DIR is stored in an environment variable, which child processes inherit.
    """
    rest: list[str] = []
    words = iter(given)
    for word in words:
        option, equals, value = word.partition("=")
        if option != CONF_DIR_OPTION:
            rest.append(word)
            continue
        folder = value if equals else next(words, "")  # `--conf-dir=DIR` or `--conf-dir DIR`
        _check_conf_dir(CONF_DIR_OPTION, folder)
        os.environ[CONF_DIR_VARIABLE] = str(path(folder).resolve())
    if inherited := os.environ.get(CONF_DIR_VARIABLE):
        _check_conf_dir(CONF_DIR_VARIABLE, inherited)
    return rest


def _check_conf_dir(source: str, folder: str) -> None:
    wants = "a directory with groups as in conf/, such as DIR/experiment/mine.yaml"
    if not folder or not path(folder).is_dir():
        todo = f"give {CONF_DIR_OPTION} a directory that exists"
        raise ConfigError(source, folder or "nothing", wants, todo)
    given = path(folder).resolve()
    if _has_groups(given):
        return
    found = [given.parent] if _has_groups(given.parent) else []
    found += sorted(below for below in given.iterdir() if _has_groups(below))
    if found or any(given.glob("*.yaml")):
        todo = f"write {CONF_DIR_OPTION} {' or '.join(map(str, found)) or 'DIR'}"
        raise ConfigError(source, f"{folder}, which has no groups", wants, todo)


def _has_groups(folder: Path) -> bool:
    """Return whether a folder has a folder of files that is named as one of conf/."""
    names = (group.name for group in CONF.iterdir() if group.is_dir())
    return any(any((folder / name).glob("*.yaml")) for name in names)


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Pretrain GPT and encoder-decoder models on Slurm clusters, or on this machine.",
            "",
            "usage: frontier-llm [--conf-dir DIR] COMMAND [arguments]",
            "       frontier-llm COMMAND --help",
            "",
            "commands",
            *lines,
            "",
            "options",
            "  --conf-dir DIR  a directory with your own configuration files, such as",
            "                  DIR/experiment/mine.yaml or DIR/model/mine.yaml. They replace",
            "                  files of the program that have the same name",
            "  --version       print the version",
        ]
    )
