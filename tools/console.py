"""Where tools print: as wide as the terminal, and wide enough for every table anywhere else."""

from rich.console import Console

WIDTH = 200
"""Of files and pipes, which have none: rich would take 80 columns and cut figures short."""


def wide_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console on standard output, or on standard error."""
    console = Console(stderr=stderr, highlight=highlight)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=highlight, width=WIDTH)
