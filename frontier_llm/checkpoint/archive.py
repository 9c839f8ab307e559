"""Run the user's command that copies committed checkpoints to an archive."""

import logging
import os
import subprocess
import threading
from collections.abc import Collection
from pathlib import Path

from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.writer import Writer

_log = logging.getLogger(__name__)
_MOST_SHOWN = 300
"""Characters of the command's output that a warning shows."""


class Archive:
    """Runs the command for one checkpoint at a time, on a thread of rank 0."""

    def __init__(self, command: str | None, every_steps: int, folder: Path) -> None:
        """Initialise.

        Args:
            command: shell command, which finds the checkpoint's folder in `$CHECKPOINT`; None: no
                archive.
            every_steps: checkpoints whose step is a multiple of this number are archived.
            folder: folder of all checkpoints of the run.
        """
        self._command, self._every, self._folder = command, every_steps, folder
        self._writer, self._lock = Writer("checkpoint archive"), threading.Lock()
        self._pending: list[int] = []

    def committed(self, step: int) -> None:
        """Archive a checkpoint that was committed, if it is due. Any thread calls this."""
        if self._command is not None and step % self._every == 0:
            with self._lock:
                self._pending.append(step)
                self._writer.submit(lambda: self._run(step))

    def spared(self) -> Collection[int]:
        """Return the steps that must not be deleted, because they are not archived yet."""
        with self._lock:
            return tuple(self._pending)

    def wait(self) -> None:
        """Wait until everything is archived, or has failed."""
        self._writer.wait_below(1)

    def _run(self, step: int) -> None:
        path = self._folder / step_folder(step)
        assert self._command is not None
        try:
            ended = subprocess.run(
                self._command,
                shell=True,
                env=os.environ | {"CHECKPOINT": str(path.absolute())},
                capture_output=True,
                text=True,
                check=False,
            )
            if ended.returncode:
                output = (ended.stderr or ended.stdout).strip()[-_MOST_SHOWN:]
                _log.warning(
                    "checkpoint.tiers.archive.command ended with exit code %d for %s: %s",
                    ended.returncode, path, output,
                )  # fmt: skip
            else:
                _log.info("%s is archived", path)
        except OSError as error:
            _log.warning("checkpoint.tiers.archive.command cannot run: %s", error)
        with self._lock:
            self._pending.remove(step)
