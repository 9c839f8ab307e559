"""What all benchmarks share: contenders that take turns, medians and ratios, tables, JSON, options.

A *contender* is one program or setting that is compared. Every contender has one *turn* in a round,
so that other load on the machine affects all of them; every second round is in the reverse order. A
ratio compares two contenders in the same round, and medians are taken over rounds.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from frontier_lab.option_values import new_file, written
from frontier_llm.cli.console import plain_table, wide_console
from frontier_llm.cli.options import at_least, folder, tool_parser
from frontier_llm.errors import LaunchError, TrainingError
from frontier_llm.telemetry.history import History
from frontier_llm.units import MIB

ROOT = Path(__file__).resolve().parents[1]
MEGA = 1e6
WIDTH = 120
"""Smallest width of a table in characters, for output that is not a terminal."""
Turn = TypeVar("Turn")
"""What one turn of a contender has measured, often one object for each rank."""


@dataclass
class Contender(Generic[Turn]):
    """One of the programs or settings that are compared, and what its turns have measured."""

    name: str
    turn: Callable[[], Turn]
    """Takes one turn."""
    rounds: list[Turn] = field(default_factory=list)
    error: str | None = None
    """Why it failed; it takes no more turns then. The rounds before are kept."""

    def values(self, figure: Callable[[Turn], float]) -> list[float]:
        """Return a figure of each round."""
        return [figure(turn) for turn in self.rounds]

    def median(self, figure: Callable[[Turn], float]) -> float:
        """Return the median of a figure over the rounds."""
        return statistics.median(self.values(figure))

    def ratios(self, base: "Contender[Turn]", figure: Callable[[Turn], float]) -> list[float]:
        """Return a figure of this contender divided by that of another one, round by round."""
        return ratios(self.values(figure), base.values(figure))


def take_turns(
    contenders: Sequence[Contender[Any]],
    rounds: int,
    show: Callable[[str], None] = lambda name: None,
) -> None:
    """Let contenders take turns; one that fails is left out from then on.

    `show` is called with a contender's name before each of its turns.
    """
    for index in range(rounds):
        for contender in alternating(contenders, index):
            if contender.error is None:
                show(contender.name)
                try:
                    contender.rounds.append(contender.turn())
                except (TrainingError, LaunchError, ValueError) as error:
                    contender.error = str(error)


def compare(turns: Mapping[str, Callable[[], Turn]], rounds: int) -> dict[str, Contender[Turn]]:
    """Return contenders that have all taken their turns, by name.

    Raises:
        TrainingError: one failed; the message says which, and why.
    """
    contenders = {name: Contender(name, turn) for name, turn in turns.items()}
    take_turns(list(contenders.values()), rounds)
    for contender in contenders.values():
        if contender.error is not None:
            raise TrainingError(f"{contender.name}: {contender.error}")
    return contenders


def alternating(contenders: Sequence[Any], index: int) -> Sequence[Any]:
    """Return the contenders in the order of a round: every second one is reversed."""
    return contenders[:: -1 if index % 2 else 1]


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the quotients of two series, as far as both have rounds."""
    return [value / other for value, other in zip(values, base, strict=False)]


def check_alike(what: str, series: Iterable[tuple[str, Sequence[float]]], limit: float) -> float:
    """Check that contenders train alike: their losses or norms are those of the first one.

    Args:
        what: what is compared, for the message.
        series: name and values of each contender or of each of its rounds.
        limit: largest difference, relative to the values of the first series.

    Returns:
        The largest difference.

    Raises:
        TrainingError: a difference exceeds the limit or is not a number, or the lengths differ.
    """
    (base, expected), *others = series
    largest = 0.0
    for name, values in others:
        if len(values) != len(expected):
            raise TrainingError(f"{what}: {name} has {len(values)} and {base} {len(expected)}")
        pairs = zip(values, expected, strict=True)
        differences = [abs(value - wanted) / abs(wanted) for value, wanted in pairs]
        largest = max([largest, *differences])
        if not all(difference <= limit for difference in differences):  # NaN is not
            raise TrainingError(
                f"{what} of {name} differ from those of {base} by {max(differences):.1e}; "
                f"the limit is {limit:.0e}"
            )
    return largest


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the minimum, the maximum and all values."""
    median, least, most = statistics.median(values), min(values), max(values)
    return {"median": median, "min": least, "max": most, "all": list(values)}


def fixed(value: float | None, digits: int = 2, factor: float = 1) -> str:
    """Return a number with some digits, as `factor` units; - if it is unknown."""
    return "-" if value is None else f"{value * factor:.{digits}f}"


def span(values: Mapping[str, Any], digits: int = 2, factor: float = 1) -> str:
    """Return the median of a spread, with its minimum and maximum."""
    median, least, most = (fixed(values[key], digits, factor) for key in ("median", "min", "max"))
    return f"{median} ({least}, {most})"


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 1,
    caption: str = "",
) -> None:
    """Print a table, whose first `left` columns are left-aligned."""
    table = plain_table(title, headings, right=headings[left:])
    for row in rows:
        table.add_row(*row)
    table.caption = caption or None
    console = wide_console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(table)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar; yield a function that advances it by one, and changes the label if given one.

    No thread refreshes the bar, because benchmarks fork.
    """
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    console = wide_console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(label, total=total)

        def advance(text: str = label) -> None:
            bar.update(task, description=text, advance=1, refresh=console.is_terminal)

        yield advance


def write_json(options: argparse.Namespace, facts: Mapping[str, Any]) -> None:
    """Write what was measured to `--json`, with the options, the machine and its load."""
    if options.json:
        given = {key: str(value) for key, value in vars(options).items()}
        content = {**about(), "load": os.getloadavg(), "options": given, **facts}
        with written(options.json, "--json"):
            options.json.write_text(json.dumps(content, indent=1) + "\n")


def about() -> dict[str, Any]:
    """Return the date, the processor, its cores and the version of torch."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
    }


def mebibytes(size: float) -> str:
    """Return a number of bytes as whole MiB."""
    return fixed(size, 0, 1 / MIB)


def threads_of(options: argparse.Namespace, ranks: int) -> int:
    """Return the CPU threads per rank: `--threads`, or a rank's share of the cores."""
    return options.threads or max(1, (os.cpu_count() or 1) // ranks)


def call(
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    limit_seconds: float | None = None,
) -> str:
    """Run a command in the root of the checkout; return its output.

    Raises:
        TrainingError: it failed or exceeded the limit; the message has the end of its output.
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
    what = " ".join(command)
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=limit_seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TrainingError(f"{what} did not end in {limit_seconds} s") from error
    if ended.returncode:
        end = (ended.stdout + ended.stderr)[-3000:]
        raise TrainingError(f"{what}: exit code {ended.returncode}\n{end}")
    return ended.stdout


def train_run(
    overrides: Sequence[str],
    run_dir: Path,
    variables: Mapping[str, str] | None = None,
    limit_seconds: float | None = None,
) -> History:
    """Train in a process of its own; return what the run has recorded.

    Raises:
        TrainingError: the run failed.
    """
    command = [sys.executable, str(ROOT / "train.py"), *overrides, f"run.dir={run_dir.absolute()}"]
    call(command, variables, limit_seconds)
    return History.read(run_dir)


@contextmanager
def work_folder(name: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder that is removed at the end, also if this process is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix=f"{name}_", dir=parent) as made:
        yield Path(made)


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
    add = parser.add_argument
    if quick:
        add("--quick", action="store_true", help=f"{quick}: a smoke test")
    if rounds:
        add("--rounds", type=at_least(1), default=rounds, metavar="N",
            help="repetitions of each measurement; the median counts (default %(default)s)",
        )  # fmt: skip
    if folder_for:
        add("--folder", type=folder, metavar="DIR",
            help=f"{folder_for} (default: the system's temporary folder)",
        )  # fmt: skip
    add("--json", type=new_file, metavar="FILE", help="also write all results to this file")
    return parser


def add_numbers(
    parser: argparse.ArgumentParser, numbers: Sequence[tuple[str, int, int, str]]
) -> None:
    """Add integer options, each given by its name, its least value, its default and its help."""
    for name, least, default, meaning in numbers:
        parser.add_argument(
            f"--{name}", type=at_least(least), default=default, metavar="N",
            help=f"{meaning} (default {default})",
        )  # fmt: skip


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
