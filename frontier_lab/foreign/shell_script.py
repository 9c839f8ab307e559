"""What is known of a bash script while its commands are read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from frontier_lab.foreign.shell_conditions import UNKNOWN
from frontier_lab.foreign.shell_syntax import Command, too_long

MOST_STEPS = 100_000
"""Limit of the commands and words that are read; scripts of runs have some hundreds."""


@dataclass
class Script:
    """The commands of a script, with the values of its variables put in."""

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    """Conditions that depend on something unknown; the commands below them are left out."""
    unread: list[str] = field(default_factory=list)
    """Files that it sources and that were not found."""
    folder: Path | None = None
    """Where files are looked for that it sources."""
    functions: dict[str, list[Command]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """Functions and files in the order in which they were read."""
    left_out: list[list[str]] = field(default_factory=list)
    """Commands with options that may not be run."""
    returned: bool = False
    """Whether the function or the sourced file that is read has come to its `return`."""
    jump: str = ""
    """`break` or `continue`, if the body of a loop that is read has come to it."""
    steps: list[int] = field(default_factory=lambda: [0])
    """The number of commands and words read so far, of all scripts together."""

    def forget(self, names: Iterable[str]) -> None:
        """Note that the values of variables are not known from here on."""
        self.variables |= {name: [f"${{{name}{UNKNOWN}"] for name in names}

    def count(self, steps: int) -> None:
        """Count commands or words; refuse a script that never comes to its end."""
        self.steps[0] += steps
        if self.steps[0] > MOST_STEPS:
            raise too_long()
