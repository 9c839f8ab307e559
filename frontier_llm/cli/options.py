"""Define the options that commands share, and the types of their values."""

import argparse
import difflib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from frontier_llm.config.paths import expanded
from frontier_llm.errors import NO_ROOM, ConfigError, DataError, FrontierError

STOPPED_BY = 128
"""Added to the number of the signal that ends a command: its exit code, as in a shell."""
PIPE_CLOSED = 141
"""Exit code when the reader of a pipe has ended, the same as in a shell."""
MULTIRUN = {"-m", "--multirun"}
"""Options that make `train` a sweep; hydra's own programs have the same."""
THE_LINE = "the command line"
"""Stands for the key in errors about arguments that are no keys."""
TRIAL_VARIABLE = "FRONTIER_LLM_TRIAL"
"""Environment variable of the trials of a sweep."""


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser for the value of an option: an integer that is `least` or more."""

    def parse(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,18}", text) or int(text) < least:
            raise ConfigError(
                THE_LINE, text, f"a whole number from {least} on", f"write {max(least, 1)} or more"
            )
        return int(text)

    return parse


def path(text: str) -> Path:
    """Parse the value of an option: a path, as keys of the configuration are."""
    try:
        return Path(expanded(text))
    except ValueError as error:
        raise ConfigError(THE_LINE, text, f"a path: {error}", "correct the path") from None


def folder(text: str) -> Path:
    """Parse the value of an option: a folder that exists."""
    found = path(text)
    if not found.is_dir():
        similar = difflib.get_close_matches(found.name, names(found.parent), n=1)
        is_absent = similar and not found.exists()
        todo = f"did you mean {found.parent / similar[0]}?" if is_absent else "correct the path"
        if text.startswith("run.dir="):
            todo = f"drop run.dir=, write {text.partition('=')[2]}"
        raise ConfigError(THE_LINE, text, "a folder that exists", todo)
    return found


def names(folder: Path) -> list[str]:
    """Return the names of the entries of a folder, sorted; none of what is no folder."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in the same form as mistakes in the configuration."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong; exit with code 2."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        self.refuse(ConfigError(THE_LINE, message, usage, f"see {self.prog} --help"))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # a parser of values does not know its option
        name = str(next(iter(action.option_strings), action.metavar or action.dest))
        try:
            return super()._get_value(action, arg_string)
        except ConfigError as error:
            self.refuse(ConfigError(name, error.got, error.wants, error.todo))
        except OSError as error:  # the path is too long, or permission is denied
            wants = f"a path that can be read ({error.strerror})"
            self.refuse(ConfigError(name, arg_string, wants, "correct the path"))

    def refuse(self, error: ConfigError) -> NoReturn:
        """Print the error; exit with its code."""
        self.exit(error.exit_code, f"{error}\n")


def tool_parser(doc: str | None) -> Parser:
    """Return a parser whose help begins with the docstring of a module."""
    form = argparse.RawDescriptionHelpFormatter
    return Parser(description=doc, formatter_class=form, allow_abbrev=False)


def refuse_search(command: str, arguments: Sequence[str]) -> None:
    """Refuse `sweep=NAME` in a command without a search, because it would ignore the axes.

    A trial is an exception: its command line contains the name of its search.
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
    """Run a command and return its exit code. A user's mistake or Ctrl-C gives no traceback.

    SIGTERM ends a command like Ctrl-C, unless it handles signals itself; a second one kills it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BaseException as error:
        return _exit_code(_interruption_behind(error) or error)
    finally:
        if signal.getsignal(signal.SIGTERM) is _interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ended with an error, whose message is printed.

    An error that is no mistake of the user is raised again.
    """
    if isinstance(error, FrontierError):
        print(error, file=sys.stderr, end="\n" if str(error) else "")
        # before the ranks start, a corpus that cannot be read is a mistake like a wrong key
        return ConfigError.exit_code if isinstance(error, DataError) else error.exit_code
    if isinstance(error, KeyboardInterrupt):
        number, *what = error.args or (signal.SIGINT,)
        print("; ".join(("interrupted", *what)), file=sys.stderr)
        return STOPPED_BY + int(number)
    if not isinstance(error, OSError) or error.errno not in (errno.EPIPE, *NO_ROOM):
        raise error
    if _takes_output(sys.stdout.fileno()):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the reader has ended, as `head` does
        return PIPE_CLOSED
    print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
    return 1


def _interruption_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interruption that an error hides, None if there is none.

    A library that is interrupted cleans up what it has half built, and may fail in it: hydra does.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt(number)


def _takes_output(descriptor: int) -> bool:
    try:
        os.write(descriptor, b"\n")
    except OSError:
        return False
    return True
