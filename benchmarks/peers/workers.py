"""Start and stop the workers of a benchmark: one process per library, started when first needed.

A contender is one way to train (bench_sharding.py --contenders); a turn is one timed run of it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from benchmarks.peers.contenders import BuilderModule
from benchmarks.peers.turn import RankFigures, Turn, figures_from
from frontier_llm.errors import TrainingError

ROOT = Path(__file__).resolve().parents[2]


class TurnFailedError(TrainingError):
    """A contender failed in its turn."""


class Workers:
    """The worker processes; the end of the context kills them and their ranks."""

    def __init__(self, log: Path, pythons: Mapping[BuilderModule, Path]) -> None:
        """Store the settings; no worker is started yet.

        Args:
            log: file for the output of libraries; temporary files are written to its folder.
            pythons: Python interpreters of the workers that need another environment.
        """
        self._log, self._pythons = log, pythons
        self._processes: dict[BuilderModule, subprocess.Popen[str]] = {}

    def __enter__(self) -> "Workers":
        self._file: TextIO = self._log.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            self._end(process)
        self._file.close()

    def run(self, builder: BuilderModule, turn: Turn) -> list[RankFigures]:
        """Run a turn on a worker; return the measurements of its ranks.

        Raises:
            TurnFailedError: the turn failed; the message has the traceback of the first rank that
                failed.
        """
        process = self._process(builder)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(turn.to_json() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._end(self._processes.pop(builder))
            raise TurnFailedError(f"the worker process ended:\n{_tail(self._log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise TurnFailedError(answer["error"])
        return [figures_from(values) for values in answer["ranks"]]

    def _process(self, builder: BuilderModule) -> "subprocess.Popen[str]":
        """Return the process of a worker; start it if it does not run."""
        if builder not in self._processes:
            python = self._pythons.get(builder, Path(sys.executable))
            # torch must start with one thread, because thread pools do not survive a fork
            threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            # files of a killed turn are removed with the driver's folder
            temporary = {"TMPDIR": str(self._log.parent)}
            self._processes[builder] = subprocess.Popen(
                [python, "-m", "benchmarks.peers.worker", builder],
                cwd=ROOT,
                env={**os.environ, **threads, **temporary},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._file,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the workers
            )
        return self._processes[builder]

    def _end(self, process: "subprocess.Popen[str]") -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
