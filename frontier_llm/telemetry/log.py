"""Configure the log of each rank.

Rank 0 logs to the console and to run.log in the run directory, which also gets the lines that few
users need (level DEBUG). Other ranks log only warnings and errors, to stderr. All modules log with
`logging.getLogger(__name__)`; trainer/assemble.py calls `setup_logging`.
"""

import logging
import sys
from collections import deque
from pathlib import Path

import rich
from rich.console import Console

PACKAGE = "frontier_llm"
"""Name of the parent of all loggers of the package."""
RUN_LOG = "run.log"
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}


def setup_logging(
    rank: int, run_dir: Path | None = None, console: Console | None = None
) -> logging.Logger:
    """Configure the package's log for this rank. A second call replaces the first configuration.

    Args:
        rank: rank 0 logs everything, and to the console INFO and above; other ranks log WARNING
            and above to stderr, with `[rank N]` in front of each line.
        run_dir: folder in which rank 0 writes run.log, beginning with the lines that were logged
            before; None = write no file yet.
    """
    logger = logging.getLogger(PACKAGE)
    early = next((h.records for h in logger.handlers if isinstance(h, _Early)), deque())
    close_logging()
    logger.propagate = False
    logger.setLevel(logging.DEBUG if rank == 0 else logging.WARNING)
    if rank != 0:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        return logger
    logger.addHandler(_ConsoleHandler(console or rich.get_console()))
    if run_dir is None:
        logger.addHandler(_Early())
        return logger
    run_log = _RunLog(run_dir / RUN_LOG)
    logger.addHandler(run_log)
    for record in early:
        run_log.handle(record)
    return logger


def close_logging() -> None:
    """Close and remove all handlers that `setup_logging` has added."""
    logger = logging.getLogger(PACKAGE)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


class _Early(logging.Handler):
    """Keeps the first lines of a run, which are logged before there is a run.log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _ConsoleHandler(logging.Handler):
    """Prints through rich, so that lines appear above the live progress line."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(
                self.format(record),
                style=_STYLES.get(record.levelno, ""),
                markup=False,
                highlight=False,
                soft_wrap=not self._console.is_terminal,  # in a batch job a line stays one line
            )
        except (OSError, SystemExit):  # rich exits on a broken pipe, as in `train.py | head`
            self._console.quiet = True


class _RunLog(logging.FileHandler):
    """A log file that stops with a warning, without ending the run, if it cannot be written."""

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
