"""The package's log: rank 0 logs to the console and to run.log, other ranks log warnings to stderr.

Modules call `logging.getLogger(__name__)`; trainer/assemble.py configures the log of each rank.
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
    """Configure the package's log for this rank; a second call replaces the first.

    Args:
        rank: rank 0 logs INFO and above; other ranks log WARNING and above to stderr, with
            `[rank N]` in front of each line.
        run_dir: folder of rank 0's run.log; None = console only.
        console: rich's console for rank 0; None = its default, which the progress line uses too.

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
    """Prints through rich, so that lines appear above the live progress line."""

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
                soft_wrap=True,  # else rich breaks lines of a batch job after 80 columns
            )
        except (OSError, SystemExit):  # rich exits on a broken pipe, as in `train.py | head`
            self._console.quiet = True


class _RunLog(logging.FileHandler):
    """A log file that turns itself off, with one warning, when it cannot be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%F %T")
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (name given by logging)
        logger = logging.getLogger(PACKAGE)
        if self in logger.handlers:
            logger.removeHandler(self)
            logger.warning("%s cannot be written: %s", self.baseFilename, sys.exc_info()[1])
