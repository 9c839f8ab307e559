"""The package's log: rank 0 to the console and to run.log, other ranks only their warnings.

Modules take `logging.getLogger(__name__)` and know nothing of this; the composition root of each
rank calls `setup_logging` once.
"""

import logging
import sys
from pathlib import Path

import rich
from rich.console import Console

PACKAGE = "frontier_llm"
RUN_LOG = "run.log"
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}


def setup_logging(
    rank: int, run_dir: Path | None = None, console: Console | None = None
) -> logging.Logger:
    """Send the package's log where this rank's belongs; a second call replaces the first.

    Args:
        rank: 0 writes everything from INFO on; the others only WARNING and worse, to stderr,
            each line headed by `[rank N]`.
        run_dir: where rank 0 also writes run.log; absent = console only.
        console: of rank 0; absent = rich's own, which the progress line uses too.

    Returns:
        The package's logger.
    """
    logger = logging.getLogger(PACKAGE)
    close_logging()
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if rank != 0:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        return logger
    logger.addHandler(_ConsoleHandler(console or rich.get_console()))
    if run_dir is not None:
        logger.addHandler(_RunLog(run_dir / RUN_LOG))
    return logger


def close_logging() -> None:
    """Close what `setup_logging` opened."""
    logger = logging.getLogger(PACKAGE)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


class _ConsoleHandler(logging.Handler):
    """Prints through rich, so that lines appear above a live progress line."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(
                self.format(record),
                style=_STYLES.get(record.levelno, ""),
                markup=False,
                highlight=False,
                soft_wrap=True,  # a job's output is no terminal of 80 columns
            )
        except (OSError, SystemExit):  # rich exits on a broken pipe: `train.py | head`
            self._console.quiet = True


class _RunLog(logging.FileHandler):
    """A file that gives up, saying so once, when its disk does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%F %T")
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        logger = logging.getLogger(PACKAGE)
        if self in logger.handlers:
            logger.removeHandler(self)
            logger.warning("%s cannot be written: %s", self.baseFilename, sys.exc_info()[1])
