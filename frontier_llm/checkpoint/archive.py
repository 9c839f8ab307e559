"""Run the user's command that copies committed checkpoints to an archive.

A command that fails is repeated after growing pauses. If it still fails, the checkpoint waits until
the next checkpoint is archived, or until the run ends, and is then tried again.
"""

import logging
import os
import subprocess
import threading
from collections.abc import Collection
from pathlib import Path

from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.job_thread import JobThread
from frontier_llm.config.checkpoint import ArchiveConfig
from frontier_llm.units import format_seconds

_log = logging.getLogger(__name__)
_MOST_SHOWN = 300
"""Characters of the command's output that a warning shows."""
_PAUSE_FACTOR = 3.0
"""Each pause between two tries is this many times as long as the one before."""
MOST_WAITING = 2
"""Number of checkpoints that stay in the run directory although the command has failed for them."""


class Archive:
    """Runs the command for one checkpoint at a time, on a thread of rank 0."""

    def __init__(self, config: ArchiveConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._writer, self._lock = JobThread("checkpoint archive", yields=False), threading.Lock()
        self._pending: list[int] = []  # steps for which the command has not been run yet
        self._failed: list[int] = []  # steps that are tried again later, the oldest first
        self._failures = 0

    def committed(self, step: int) -> None:
        """Archive a checkpoint that was committed, if it is due. Any thread calls this."""
        if self._config.command is not None and step % self._config.every_steps == 0:
            with self._lock:
                self._pending.append(step)
                self._writer.submit(lambda: self._archive(step))

    def spared(self) -> Collection[int]:
        """Return the steps that must not be deleted, because they are not archived yet."""
        with self._lock:
            return *self._pending, *self._failed

    def take_failures(self) -> int:
        """Return how many times the command has failed since the last call."""
        with self._lock:
            count, self._failures = self._failures, 0
            return count

    def wait(self) -> None:
        """Wait until everything is archived, or has failed once more."""
        self._writer.wait_below(1)
        if not self._failed:
            return
        self._writer.submit(self._archive_failed)
        self._writer.wait_below(1)
        if self._failed:
            _log.warning(
                "checkpoint.tiers.archive.command has failed for %s\n"
                "  do: run the command for %s, with the folder as CHECKPOINT",
                ", ".join(str(self._path(step)) for step in self._failed),
                "it" if len(self._failed) == 1 else "each of them",
            )

    def _archive(self, step: int) -> None:
        is_archived = self._try(step)
        with self._lock:
            self._pending.remove(step)
            if not is_archived and step not in self._failed:
                self._failed.append(step)
            given_up, self._failed = self._failed[:-MOST_WAITING], self._failed[-MOST_WAITING:]
        for old in given_up:
            _log.warning(
                "%s is not archived any more and may be deleted: newer checkpoints wait for the "
                "archive",
                self._path(old),
            )
        if is_archived:
            self._archive_failed()

    def _archive_failed(self) -> None:
        for step in tuple(self._failed):
            if self._run(step) == "":
                with self._lock:
                    self._failed.remove(step)

    def _try(self, step: int) -> bool:
        tries, pause = self._config.tries, self._config.pause_seconds
        for number in range(1, tries + 1):
            failure = self._run(step)
            if not failure:
                return True
            if number < tries:
                _log.warning("%s; next try in %s", failure, format_seconds(pause))
                threading.Event().wait(pause)
                pause *= _PAUSE_FACTOR
            else:
                _log.warning(
                    "%s; %d of %d tries have failed, the next one follows the next checkpoint or "
                    "the end of the run",
                    failure, number, tries,
                )  # fmt: skip
        return False

    def _run(self, step: int) -> str:
        path, command = self._path(step), self._config.command
        assert command is not None
        failure = ""
        try:
            ended = subprocess.run(
                command,
                shell=True,
                env=os.environ | {"CHECKPOINT": str(path.absolute())},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            failure = f"checkpoint.tiers.archive.command cannot run for {path}: {error}"
        else:
            if ended.returncode:
                output = (ended.stderr or ended.stdout).strip()[-_MOST_SHOWN:]
                failure = (
                    "checkpoint.tiers.archive.command ended with exit code "
                    f"{ended.returncode} for {path}: {output}"
                )
        if failure:
            with self._lock:
                self._failures += 1
        else:
            _log.info("%s is archived", path)
        return failure

    def _path(self, step: int) -> Path:
        return self._folder / step_folder(step)
