"""Define the options that benchmarks share."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from frontier_llm.cli.options import at_least, folder, new_file, tool_parser


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
