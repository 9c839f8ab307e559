"""Check the options of the commands of this package and of benchmarks, and write their files."""

import argparse
import errno
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.folders import FOLDER, MANIFEST, parse_folder
from frontier_llm.cli.options import THE_LINE, Parser, folder, names, path
from frontier_llm.errors import ConfigError, advise_to_write
from frontier_llm.units import counted

RUN_CONFIG = "config.yaml"
MOST_RUNS = 5
"""Number of runs that an error names, the last ones by name."""


def positive(text: str) -> float:
    """Parse the value of an option: a finite number above zero."""
    return _finite(text, "a number above 0", lambda value: value > 0)


def not_negative(text: str) -> float:
    """Parse the value of an option: a finite number from zero on."""
    return _finite(text, "a number from 0 on", lambda value: value >= 0)


def _finite(text: str, wants: str, suits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and suits(value)):
        raise ConfigError(THE_LINE, text, wants, "write a number such as 0.5")
    return value


def new_file(text: str) -> Path:
    """Parse the value of an option: a file that can be written.

    It is tried, because permissions do not tell about /proc, quotas and names that are too long.
    """
    file = path(text)
    try:
        if not file.exists():
            with file.open("xb"):
                file.unlink()
        elif file.is_file():
            file.open("ab").close()
        elif file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        wants = f"a file that can be written ({error.strerror})"
        raise ConfigError(THE_LINE, text, wants, "choose another name or folder") from None
    return file


def json_file(text: str) -> str:
    """Parse the value of `--json`: a file that can be written, or - for standard output."""
    return text if text == "-" else str(new_file(text))


def write_json(target: str | Path, values: Any, option: str = "FILE") -> None:
    """Write values to the file of an option, or to standard output for `-`."""
    text = json.dumps(values, indent=1, default=str) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(target), text, option)


def write_text(path: Path, text: str, option: str = "FILE") -> None:
    """Write the file of an option; refuse one that cannot be written."""
    with written(path, option):
        path.write_text(text, encoding="utf-8")


@contextmanager
def written(path: Path, option: str = "FILE") -> Iterator[None]:
    """Turn a failure to write the file of an option into a user error."""
    try:
        yield
    except OSError as error:
        wants = f"a file that can be written ({error.strerror})"
        raise ConfigError(option, path, wants, "name another file") from None


def file(text: str) -> Path:
    """Parse the value of an option: a file that exists."""
    if path(text).is_dir():
        raise ConfigError(THE_LINE, f"{text}, a folder", "a file", f"name files, such as {text}/*")
    if not path(text).is_file():
        raise ConfigError(THE_LINE, text, "a file that exists", "correct the path")
    return path(text)


def check_writable(key: str, folder: Path) -> Path:
    """Check that a folder can be made and written; return the part of its path that exists.

    Raises a ConfigError if it cannot; the error names `key`.
    """
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:  # permissions do not tell about /proc, quotas and the root user of another machine
        tempfile.TemporaryDirectory(dir=above).cleanup()
    except OSError as error:
        wants = f"a folder that can be written: {above} is none ({error.strerror})"
        raise ConfigError(key, folder, wants, advise_to_write(key, error)) from None
    return above


def trained_run(text: str) -> Path:
    """Parse the value of an option: a run directory, of a command that has `--checkpoint` too."""
    return run_folder(text, has_weights=True)


def run_folder(text: str, *, has_weights: bool = False) -> Path:
    """Parse the value of an option: a run directory."""
    found = folder_of_one(text)
    if not (found / RUN_CONFIG).is_file():
        runs = (folder for folder in found.absolute().parents if (folder / RUN_CONFIG).is_file())
        todo, run = restored_config(found) or "name the run.dir of a run", next(runs, None)
        if run is not None:
            todo = f"name {os.path.relpath(run)}"
            if has_weights and is_saved(found):
                todo += f"; to choose weights, add --checkpoint {text}"
        raise ConfigError(THE_LINE, text, f"a run directory, which has {RUN_CONFIG}", todo)
    return found


def restored_config(run: Path) -> str | None:
    """Return how to get back a lost configuration from a checkpoint of the run, if it has one."""
    shown = shlex.quote(str(run))
    is_there = is_saved(run / FOLDER)
    return f"frontier-llm inspect {shown} --config > {shown}/{RUN_CONFIG}" if is_there else None


def is_saved(folder: Path) -> bool:
    """Return whether a folder is a checkpoint or has checkpoints."""
    return (folder / MANIFEST).exists() or any(map(parse_folder, names(folder)))


def folder_of_one(text: str) -> Path:
    """Parse the value of an option: a folder that is not a folder of runs."""
    found = folder(text)
    runs = [name for name in names(found) if (found / name / RUN_CONFIG).is_file()]
    if runs and not (found / RUN_CONFIG).is_file():
        named = " or ".join(str(found / name) for name in runs[-MOST_RUNS:])
        if len(runs) > MOST_RUNS:
            named += f", or one of {counted(len(runs) - MOST_RUNS, 'earlier run')}"
        raise ConfigError(
            THE_LINE, text, f"one run, not a folder of {counted(len(runs), 'run')}", f"name {named}"
        )
    return found


def saved(text: str) -> Path:
    """Parse the value of an option: a checkpoint, a folder of checkpoints, or a run directory."""
    found = folder_of_one(text)
    if not is_saved(found) and not is_saved(found / FOLDER):
        wants = "a checkpoint, a folder of checkpoints, or a run directory with checkpoints"
        raise ConfigError(THE_LINE, text, wants, "name a folder such as RUN_DIR/checkpoints/STEP")
    return found


def saved_in_run(text: str) -> Path:
    """Parse the value of `--checkpoint`: as `saved`, or the name of a checkpoint of the run."""
    return path(text) if parse_folder(text) and not path(text).exists() else saved(text)


def refuse_useless(
    parser: Parser,
    options: argparse.Namespace,
    needs: Mapping[str, str],
    excludes: Mapping[str, Sequence[str]],
) -> argparse.Namespace:
    """Refuse options without effect, because the command would do less than it was asked to.

    `needs` names for each option the one without which it has no effect, and `excludes` those with
    which it has none. An option is given if its value is not the default.
    """
    given: set[str] = set()
    for action in parser._actions:
        if getattr(options, action.dest, action.default) not in (action.default, []):
            given.update([*action.option_strings, str(action.metavar)])
    for name, other in needs.items():
        if name in given and other not in given:
            wants = f"{other}, without which {name} has no effect"
            todo = f"add {other}, or leave out {name}"
            parser.refuse(ConfigError(name, f"{name} without {other}", wants, todo))
    for name, others in excludes.items():
        for other in given.intersection(others) if name in given else ():
            wants = f"one of the two: {name} has no effect with {other}"
            todo = f"leave out {name} or {other}"
            parser.refuse(ConfigError(name, f"{name} with {other}", wants, todo))
    return options
