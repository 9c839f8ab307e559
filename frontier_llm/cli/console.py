"""Provide consoles that are as wide as the terminal, or as the widest table without a terminal."""

from rich.console import Console

WIDTH = 200
"""Columns of output to files and pipes. Rich would assume 80 columns and truncate figures."""


def wide_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console on standard output, or on standard error."""
    console = Console(stderr=stderr, highlight=highlight)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=highlight, width=WIDTH)
