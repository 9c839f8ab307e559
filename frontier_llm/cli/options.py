"""Define the options that commands and benchmarks share, and the types of their values."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier_llm.errors import ConfigError, FrontierError

INTERRUPTED = 130
"""Exit code after Ctrl-C, the same as in a shell."""
BROKEN_PIPE = 141
"""Exit code if the reader of the output has ended, the same as in a shell."""
MULTIRUN = {"-m", "--multirun"}
"""Options that make `train` a sweep; hydra's own programs have the same."""
TRIAL_VARIABLE = "FRONTIER_LLM_TRIAL"
"""Environment variable of the trials of a sweep."""


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser for the value of an option: an integer that is `least` or more."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return parse


def positive(text: str) -> float:
    """Parse the value of an option: a finite number above zero."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def new_file(text: str) -> Path:
    """Parse the value of an option: a file that can be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def folder(text: str) -> Path:
    """Parse the value of an option: a folder that exists."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is not a folder")
    return path


def tool_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the docstring of a module."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def bench_parser(
    doc: str | None, *, rounds: int | None = None, folder_for: str = "", quick: str = ""
) -> argparse.ArgumentParser:
    """Return a parser for a benchmark, with `--json` and the common options that it has.

    Args:
        doc: docstring of the module.
        rounds: default of `--rounds`; None leaves the option out.
        folder_for: purpose of `--folder`; the empty string leaves the option out.
        quick: effect of `--quick`; the empty string leaves the option out.
    """
    parser = tool_parser(doc)
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}: a smoke test")
    if rounds:
        parser.add_argument(
            "--rounds", type=at_least(1), default=rounds, metavar="N",
            help="repetitions of each measurement; the median counts (default %(default)s)",
        )  # fmt: skip
    if folder_for:
        parser.add_argument(
            "--folder",
            type=folder,
            metavar="DIR",
            help=f"{folder_for} (default: the system's temporary folder)",
        )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="also write all results to this file"
    )
    return parser


def parse_bench(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    Args:
        parser: the parser of the benchmark.
        arguments: the command line; None: the command line of this process.
        quick: defaults of options under `--quick`; values on the command line replace them.
    """
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**quick)
    return parser.parse_args(arguments)


def refuse_search(command: str, arguments: Sequence[str]) -> None:
    """Refuse `sweep=NAME` in a command without a search, because it would ignore the axes.

    A trial is an exception: its command line contains the name of its search.

    Raises:
        ConfigError: the command is not a sweep and chooses a file of conf/sweep.
    """
    names = [word.partition("=")[2] for word in arguments if word.lstrip("+").startswith("sweep=")]
    is_search = command == "sweep" or MULTIRUN & set(arguments) or TRIAL_VARIABLE in os.environ
    if names and names[0] != "null" and not is_search:
        raise ConfigError(
            "sweep",
            names[0],
            f"no file of conf/sweep: frontier-llm {command} uses one configuration, not a search",
            f"run frontier-llm sweep sweep={names[0]}, or choose an experiment=NAME instead",
        )


def run_command(main: Callable[[], int]) -> int:
    """Run a command and return its exit code. A user's mistake or Ctrl-C gives no traceback."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        return BROKEN_PIPE
    except FrontierError as error:
        print(error, file=sys.stderr, end="\n" if str(error) else "")
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
