"""Make consoles that are wide enough for the tables of the commands."""

from rich.console import Console

WIDTH = 200
"""Characters per line of output to files and pipes. Rich would assume 80 and cut numbers off."""


def wide_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console of the terminal's width, or of WIDTH characters without a terminal."""
    console = Console(stderr=stderr, highlight=highlight)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=highlight, width=WIDTH)
