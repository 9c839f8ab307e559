"""Define the errors that are shown to a user. Any other exception is a bug of this program.

Each message says what is wrong and what to do, so that the user needs no traceback. The class of an
error determines the exit code of the process.
"""

import errno
import sys
from contextlib import suppress
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, an exhausted quota and an exceeded file size."""


def printable(text: str) -> str:
    """Escape all characters that a terminal does not print, except line breaks and tabs."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


class FrontierError(Exception):
    """A failure that the user can act on. Its text may quote a file and is safe to print."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())

    @property
    def reason(self) -> str:
        """What is wrong, without what to do: for a message that says something else to do."""
        return str(self).partition("\n  do: ")[0]


class ConfigError(FrontierError):
    """A value of the configuration is wrong: the key, what it got, what it wants, what to do."""

    exit_code = 2

    def __init__(self, key: str, got: object, wants: str, todo: str) -> None:
        self.key, self.got, self.wants, self.todo = key, got, wants, todo
        super().__init__(key, got, wants, todo)

    def __str__(self) -> str:
        got = "null" if self.got is None else self.got  # as in YAML
        return printable(
            f"configuration error at {self.key}\n"
            f"  got:    {got}\n"
            f"  wants:  {self.wants}\n"
            f"  do:     {self.todo}"
        )


IF_DAMAGED = "do: move this checkpoint away, and use another one or a copy of it"
"""What a user can do about a damaged checkpoint."""


def damaged_checkpoint(what: str) -> "CheckpointError":
    """Return the error for a damaged checkpoint, with what to do."""
    return CheckpointError(f"{what}\n  {IF_DAMAGED}")


def refuse(*cases: tuple[object, str, object, str, str]) -> None:
    """Raise a ConfigError for the first case that holds: (whether it does, key, got, wants, todo).

    The texts of all cases are made, also of those that do not hold.
    """
    for holds, key, got, wants, todo in cases:
        if holds:
            raise ConfigError(key, got, wants, todo)


class LaunchError(FrontierError):
    """The processes of a run cannot be started, or cannot find each other."""


class DataError(FrontierError):
    """A corpus, a tokenizer or a dataset file is absent or unusable."""


class CheckpointError(FrontierError):
    """A checkpoint cannot be written, is absent or damaged, or belongs to another model."""


class TrainingError(FrontierError):
    """The training cannot continue: the loss is not finite, or samples were lost."""


class RankFailure(FrontierError):
    """A rank stopped because another rank failed first."""


class StopRequested(FrontierError):
    """The run was asked to stop; it saved its state and stopped."""

    exit_code = 3


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of pyproject.toml."""
    return f"{sys.executable} -m pip install 'frontier-llm[{extra}]'"


def advise_to_write(key: str, error: OSError) -> str:
    """Return what to do if the folder of a key cannot be written."""
    other = "free space there" if error.errno in NO_ROOM else "get write permission"
    return f"choose another {key}, or {other}"


def file_failure(path: Path, done: str, error: OSError) -> str:
    """Say that a file cannot be `done` ("written", "renamed", ...), why, and what to do."""
    todo = "free space or permit writing there, or choose another folder; then start again"
    return f"{path} cannot be {done}: {error.strerror or error}\n  do: {todo}"


def flush_output() -> None:
    """Write what stdout and stderr still hold; a full disk or a closed terminal is no error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def print_error(text: str) -> None:
    """Print a line to stderr at once; a terminal that is gone is no error."""
    with suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
