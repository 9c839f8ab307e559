"""Options of the tools: nonsense is refused at once, not after an hour of measuring."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier_llm.errors import FrontierError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell's."""


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option: a whole number that is not less."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def positive(text: str) -> float:
    """Type of an option: a finite number above zero."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def new_file(text: str) -> Path:
    """Type of an option: a file that can be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def folder(text: str) -> Path:
    """Type of an option: a folder that exists."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is no folder")
    return path


def tool_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with all of a module's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def bench_parser(
    doc: str | None, *, rounds: int | None = None, folder_for: str = "", quick: str = ""
) -> argparse.ArgumentParser:
    """Return a parser with what benchmarks have in common: `--json`, and what is asked for.

    Args:
        doc: the module's docstring.
        rounds: default of `--rounds`; None: there is no such option.
        folder_for: what `--folder` is for; empty: there is no such option.
        quick: what `--quick` does; empty: there is no such option.
    """
    parser = tool_parser(doc)
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}: a smoke test")
    if rounds:
        parser.add_argument(
            "--rounds", type=at_least(1), default=rounds, metavar="N",
            help="turns of each, of which the median counts (default %(default)s)",
        )  # fmt: skip
    if folder_for:
        parser.add_argument(
            "--folder", type=folder, metavar="DIR", help=f"{folder_for} (default: the system's)"
        )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write all figures here as well"
    )
    return parser


def parse_bench(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Read a command line on which `--quick` changes defaults, but nothing that is given."""
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**quick)
    return parser.parse_args(arguments)


def ending(main: Callable[[], int]) -> int:
    """Run a tool; return its exit code. A user's mistake and Ctrl-C end without a traceback."""
    try:
        return main()
    except FrontierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
